"""Small runs for the tests of models, and a chain of stages that passes bytes as peers do."""

from __future__ import annotations

from typing import Any

import numpy as np

from swarm.config.spec import RunSpec
from swarm.core.schedule import clip_scale
from swarm.model.trainer import Inbound, Outbound, StageTrainer

FIELDS: dict[str, Any] = {
    "seed": 3,
    "steps": 6,
    "model": {"vocab_size": 256, "d_model": 16, "layers": 3, "heads": 2, "kv_heads": 1, "context": 8, "stages": 3},
    "batch": {"sequences": 4, "microbatches": 2},
    "boundary": {"kind": "anchored", "rank": 4, "dtype": "fp32"},
    "optimizer": {"warmup_steps": 2},
    "evaluation": {"sequences": 4},
}


def small_run(kind: str = "anchored", dtype: str = "fp32", **sections: dict[str, Any]) -> RunSpec:
    """Three stages of one layer each; ``sections`` change single keys."""
    fields = {key: dict(value) if isinstance(value, dict) else value for key, value in FIELDS.items()}
    fields["boundary"] |= {"kind": kind, "dtype": dtype}
    for name, section in sections.items():
        fields[name] |= section
    return RunSpec.parse(fields)


class RandomTokens:
    """Token ids that depend on (step, index) alone."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def microbatch(self, step: int, index: int) -> np.ndarray:
        model = self.spec.model
        shape = (self.spec.batch.microbatch_sequences, model.context + 1)
        return np.random.default_rng((step, index)).integers(0, model.vocab_size, shape)

    def validation(self, index: int) -> np.ndarray:
        return self.microbatch(0, index)


def received(message: Outbound) -> Inbound:
    """What the neighbour gets: the same bytes, read-only."""
    return Inbound(bytes(message.payload), message.rank, message.dtype)


class Chain:
    """All stages of a run in this process, joined by payloads."""

    def __init__(self, spec: RunSpec, *, recompute: bool = False) -> None:
        self.spec = spec
        self.source = RandomTokens(spec)
        self.stages = [
            StageTrainer(spec, stage, device="cpu", recompute=recompute) for stage in range(spec.model.stages)
        ]

    def microbatch(self, step: int, index: int, rank: int | None = None) -> float:
        """Forward and backward through all stages; the loss."""
        rank = self.spec.wire_rank if rank is None else rank
        dtype = self.spec.boundary.dtype
        inbound: Inbound | None = None
        for number, stage in enumerate(self.stages):
            tokens = self.source.microbatch(step, index) if number == 0 else None
            sent = stage.forward(step, index, tokens=tokens, inbound=inbound, rank=rank, dtype=dtype)
            inbound = received(sent) if sent is not None else None
        gradient: Inbound | None = None
        for stage in reversed(self.stages):
            sent = stage.backward(step, index, gradient=gradient, rank=rank, dtype=dtype)
            gradient = received(sent) if sent is not None else None
        return self.stages[-1].loss(step, index)

    def step(self) -> float:
        """One optimizer step; the mean loss."""
        step, count = self.stages[0].version + 1, self.spec.batch.microbatches
        loss = sum(self.microbatch(step, index) for index in range(count)) / count
        scale = clip_scale(sum(stage.squared_norm() for stage in self.stages), self.spec.optimizer.clip_norm)
        for stage in self.stages:
            stage.apply(scale)
        return loss
