"""The single-process reference: the same layers and boundaries, one graph, no network.

What the swarm computes must equal this: parity tests and benchmarks compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swarm.config.spec import RunSpec
from swarm.core.schedule import clip_scale
from swarm.model.codec import wire_round_trip
from swarm.model.device import autocast, choose_device
from swarm.model.optimizer import Optimizer
from swarm.model.stage import StageModel, token_loss


class MicrobatchSource(Protocol):
    """Where token ids come from; arrays are int64 (sequences per microbatch, context + 1)."""

    def microbatch(self, step: int, index: int) -> np.ndarray: ...

    def validation(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step: mean nats per token before it, and the gradient norm over all stages before clipping."""

    step: int
    loss: float
    grad_norm: float


class ReferenceTrainer:
    """All stages of a run in this process.

    Args:
        threads: of the operators on the CPU; None leaves torch's default.
    """

    def __init__(
        self, spec: RunSpec, sampler: MicrobatchSource, *, device: str = "auto", threads: int | None = None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec = spec
        self.sampler = sampler
        self.device = choose_device(device)
        self.stages = [StageModel(spec, stage).to(self.device) for stage in range(spec.model.stages)]
        self.optimizers = [Optimizer(stage, spec) for stage in self.stages]
        self.version = 0

    def loss(self, tokens: np.ndarray, rank: int | None = None) -> Tensor:
        """Mean nats per token of (batch, time + 1) token ids, with its graph."""
        spec = self.spec
        ids = torch.from_numpy(tokens).to(self.device)
        rank = spec.wire_rank if rank is None else rank
        c: Tensor | None = None
        with autocast(self.device):
            for stage in self.stages:
                if c is not None:
                    c = wire_round_trip(c, spec.boundary.dtype)
                c = stage(c, ids[:, :-1], rank)
            assert c is not None
            return token_loss(c, ids[:, 1:])

    def step(self) -> StepResult:
        """Accumulate one global batch, clip over all stages, update."""
        spec, step = self.spec, self.version + 1
        total = 0.0
        for index in range(spec.batch.microbatches):
            loss = self.loss(self.sampler.microbatch(step, index))
            (loss / spec.batch.microbatches).backward()
            total += float(loss.detach())
        squared_norm = sum(optimizer.squared_norm() for optimizer in self.optimizers)
        scale = clip_scale(squared_norm, spec.optimizer.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step(step, scale)
        self.version = step
        return StepResult(step, total / spec.batch.microbatches, squared_norm**0.5)

    @torch.no_grad()
    def validate(self, rank: int | None = None) -> float:
        """Mean validation loss, at another rank than the run's if asked."""
        count = self.spec.evaluation.sequences // self.spec.batch.microbatch_sequences
        losses = [float(self.loss(self.sampler.validation(index), rank)) for index in range(count)]
        return sum(losses) / count
