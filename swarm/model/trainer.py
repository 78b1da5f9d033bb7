"""What one peer computes for its stage: forward, backward, evaluation, optimizer step. Everything on one thread."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm.config.spec import RunSpec, WireDtype
from swarm.model.codec import decode, encode
from swarm.model.device import autocast, choose_device
from swarm.model.optimizer import Optimizer
from swarm.model.stage import StageModel, token_loss


@dataclass(frozen=True, slots=True)
class Inbound:
    """The payload of a received frame."""

    payload: memoryview | bytes
    rank: int
    dtype: WireDtype


@dataclass(frozen=True, slots=True)
class Outbound:
    """The payload of a frame to send."""

    payload: memoryview
    rank: int
    dtype: WireDtype


@dataclass(slots=True)
class _InFlight:
    """One microbatch between its forward and its backward."""

    inbound: Inbound | None
    tokens: np.ndarray | None
    rank: int
    entered: Tensor | None = None
    """The leaf that the gradient for the stage before arrives at."""
    left: Tensor | None = None
    """The coefficients (or the loss) that backward starts from; None when they are to be computed again."""


class StageTrainer:
    """The parameters of one stage and what is done with them.

    Args:
        device: ``auto`` or a torch device string.
        threads: of this process's operators on the CPU; None leaves torch's default.
        recompute: keep only the compressed input of a microbatch and compute its forward again in backward.
    """

    def __init__(
        self, spec: RunSpec, stage: int, *, device: str = "auto", threads: int | None = None, recompute: bool = False
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec = spec
        self.stage = stage
        self.device = choose_device(device)
        self.model = StageModel(spec, stage).to(self.device)
        self.optimizer = Optimizer(self.model, spec)
        self.version = 0
        self.recompute = recompute
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._losses: dict[tuple[int, int], Tensor] = {}

    @property
    def last(self) -> bool:
        return self.model.last

    # microbatches

    def forward(
        self,
        step: int,
        microbatch: int,
        *,
        tokens: np.ndarray | None = None,
        inbound: Inbound | None = None,
        rank: int,
        dtype: WireDtype,
    ) -> Outbound | None:
        """Forward of a training microbatch.

        Args:
            tokens: (batch, time + 1) on stage 0, else None.
            inbound: the activation frame on later stages.
            rank, dtype: of the message to the next stage.

        Returns:
            The activation frame; None on the last stage, which keeps the loss.
        """
        flight = _InFlight(inbound, tokens, rank)
        left, ids = self._run(flight)
        self._in_flight[step, microbatch] = flight
        if self.last:
            self._losses[step, microbatch] = left.detach()
            outbound = None
        else:
            outbound = Outbound(encode(left, dtype, ids, self.spec.model.vocab_size), rank, dtype)
        if not self.recompute:
            flight.left = left
        return outbound

    def backward(
        self, step: int, microbatch: int, *, gradient: Inbound | None = None, rank: int, dtype: WireDtype
    ) -> Outbound | None:
        """Backward of a microbatch: accumulates its gradient.

        Args:
            gradient: the gradient frame of the next stage; None on the last. Its rank is that of the activations it
                answers; should the forward have been computed again at another rank since, it is repeated at this one.
            rank, dtype: of the gradient for the stage before; the rank is that of its activation frame.

        Returns:
            The gradient frame; None on stage 0.
        """
        flight = self._in_flight.pop((step, microbatch))
        left = flight.left
        if gradient is not None and gradient.rank != flight.rank:
            flight.rank, left = gradient.rank, None
        if left is None:
            left, _ = self._run(flight)
        if gradient is None:
            (left / self.spec.batch.microbatches).backward()
        else:
            batch, time, columns = left.shape
            c, _ = decode(
                gradient.payload,
                batch=batch,
                time=time,
                rank=gradient.rank,
                dtype=gradient.dtype,
                vocab_size=self.spec.model.vocab_size,
                has_tokens=False,
                device=self.device,
            )
            if columns:
                left.backward(c.to(left.dtype))
        if flight.entered is None:
            return None
        entered = flight.entered.grad if flight.entered.grad is not None else torch.zeros_like(flight.entered)
        return Outbound(encode(entered, dtype, None, self.spec.model.vocab_size), rank, dtype)

    def loss(self, step: int, microbatch: int) -> float:
        """Mean nats per token of a microbatch; last stage only."""
        return float(self._losses[step, microbatch])

    @torch.no_grad()
    def evaluate(
        self,
        index: int,
        *,
        tokens: np.ndarray | None = None,
        inbound: Inbound | None = None,
        rank: int,
        dtype: WireDtype,
    ) -> Outbound | float:
        """Forward of a validation microbatch; nothing is kept. The last stage returns its loss."""
        left, ids = self._run(_InFlight(inbound, tokens, rank))
        if self.last:
            return float(left)
        return Outbound(encode(left, dtype, ids, self.spec.model.vocab_size), rank, dtype)

    def _run(self, flight: _InFlight) -> tuple[Tensor, np.ndarray]:
        """The stage's output (coefficients or loss) with its graph, and the token ids (batch, time + 1)."""
        spec = self.spec
        if flight.inbound is not None:
            entered, ids = decode(
                flight.inbound.payload,
                batch=spec.batch.microbatch_sequences,
                time=spec.model.context,
                rank=flight.inbound.rank,
                dtype=flight.inbound.dtype,
                vocab_size=spec.model.vocab_size,
                has_tokens=True,
                device=self.device,
            )
            assert ids is not None
            if torch.is_grad_enabled():
                entered.requires_grad_()
                flight.entered = entered
        else:
            assert flight.tokens is not None
            entered, ids = None, torch.from_numpy(flight.tokens).to(self.device)
        with autocast(self.device):
            left = self.model(entered, ids[:, :-1], flight.rank)
            if self.last:
                left = token_loss(left, ids[:, 1:])
        numbers = flight.tokens if flight.tokens is not None else ids.cpu().numpy()
        return left, numbers

    # the end of a step

    def squared_norm(self) -> float:
        """Sum of squares of the accumulated gradient."""
        return self.optimizer.squared_norm()

    def apply(self, clip_scale: float) -> None:
        """One optimizer step on the accumulated gradient; 0 skips the update but counts the step."""
        self.version += 1
        self.optimizer.step(self.version, clip_scale)
        self._losses.clear()

    def discard(self) -> None:
        """Drop gradients and graphs of the current step."""
        self.optimizer.drop_gradients()
        self._in_flight.clear()
        self._losses.clear()

    # state

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of parameters, moments and version."""
        tensors = {
            f"param/{name}": parameter.detach().to("cpu", copy=True)
            for name, parameter in self.optimizer.parameters.items()
        }
        tensors |= self.optimizer.state()
        tensors["version"] = torch.tensor(self.version, dtype=torch.int64)
        return tensors

    def initial_state(self) -> dict[str, Tensor]:
        """The state at version 0, derived from the seed."""
        fresh = StageModel(self.spec, self.stage)
        tensors = {f"param/{name}": parameter.detach() for name, parameter in fresh.named_parameters()}
        tensors["version"] = torch.tensor(0, dtype=torch.int64)
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`; drops what is in flight."""
        self.discard()
        for name, parameter in self.optimizer.parameters.items():
            parameter.copy_(tensors[f"param/{name}"])
        self.optimizer.load_state(tensors)
        self.version = int(tensors["version"])

    def digest(self) -> str:
        """SHA-256 of the parameters, by name."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.optimizer.parameters.items()):
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.optimizer.parameters.values())

    @property
    def in_flight_bytes(self) -> int:
        """Compressed inputs of the microbatches between forward and backward."""
        return sum(len(flight.inbound.payload) for flight in list(self._in_flight.values()) if flight.inbound)
