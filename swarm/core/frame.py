"""What a pipeline frame says of itself, how large its payload is, and when it is refused. No bytes are touched here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from swarm.config.spec import SCALE_BYTES, Rung, RunSpec, WireDtype
from swarm.errors import FrameError

PROTOCOL_VERSION = 1
"""Peers with another version are refused at enrolment and at the session with the coordinator."""

MAX_FRAME_BYTES = 256 * 2**20
"""Payloads above this are refused before anything is allocated."""


class FrameKind(IntEnum):
    """What a frame carries."""

    ACTIVATION = 1
    """Compressed activations of a training microbatch, with its token ids."""
    GRADIENT = 2
    """Compressed gradients of a training microbatch; no token ids."""
    EVALUATION = 3
    """Compressed activations of a validation microbatch, with its token ids; forward only."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Everything but the payload.

    The payload is, in this order and without padding: coefficients (batch*time*rank, ``dtype``; int4 packs two in a
    byte, low nibble first), scales (batch*time bf16, only int8 and int4 at ranks above 0), and, except for gradients,
    token ids (batch*(time+1) unsigned little-endian integers of ``token_width(vocab)`` bytes: the inputs and one more
    for the targets).
    """

    run_id: str
    view: int
    step: int
    microbatch: int
    kind: FrameKind
    source_stage: int
    target_stage: int
    rank: int
    dtype: WireDtype
    batch: int
    time: int
    route: tuple[str, ...]
    """The peer of every stage for this microbatch (source routing); empty for gradients and for evaluation's answer."""
    attempt: int = 0
    """How often this message was sent before (a repeat after a view change)."""
    limit: int = 0
    """Gradients: index in the run's ladder of the richest rung that their sender's uplink could answer with, so that
    activations do not ask for more; 0 in other frames."""

    @property
    def has_tokens(self) -> bool:
        return self.kind is not FrameKind.GRADIENT


def token_width(vocab_size: int) -> int:
    """Bytes of the smallest unsigned integer that holds every token id."""
    return 1 if vocab_size <= 2**8 else 2 if vocab_size <= 2**16 else 4


def coefficient_bytes(tokens: int, rank: int, dtype: WireDtype) -> int:
    """Bytes of ``tokens`` rows of ``rank`` coefficients, scales included."""
    scales = SCALE_BYTES * tokens if rank and dtype.scaled else 0
    return -(-tokens * rank * dtype.bits // 8) + scales


def payload_bytes(header: FrameHeader, vocab_size: int) -> int:
    """Exact size of the payload that ``header`` announces."""
    size = coefficient_bytes(header.batch * header.time, header.rank, header.dtype)
    if header.has_tokens:
        size += header.batch * (header.time + 1) * token_width(vocab_size)
    return size


def boundary_bytes_per_token(spec: RunSpec, rank: int, dtype: WireDtype) -> float:
    """Payload bytes per token that cross one boundary, both directions, token ids counted."""
    time = spec.model.context
    ids = token_width(spec.model.vocab_size) * (time + 1) / time
    return 2 * coefficient_bytes(time, rank, dtype) / time + ids


def dense_bytes_per_token(spec: RunSpec) -> float:
    """The same for dense bf16 activations and gradients: what compression is measured against."""
    return boundary_bytes_per_token(spec, spec.model.d_model, WireDtype.BF16)


@dataclass(frozen=True, slots=True)
class FrameGuard:
    """Holds what a peer of ``stage`` expects of frames, and refuses the others."""

    spec: RunSpec
    run_id: str
    stage: int

    def check(self, header: FrameHeader, *, view: int, sender_stage: int, payload_size: int) -> None:
        """Refuse a frame that this peer cannot use.

        Args:
            view: number of the view that the peer has installed; older frames are fenced, newer ones are not checked
                here (the caller waits for the view).
            sender_stage: stage of the certified sender in that view.
            payload_size: bytes announced for the payload.

        Raises:
            FrameError: names the field, what came and what was expected.
        """
        spec = self.spec
        self._expect("run id", header.run_id, self.run_id)
        if header.view < view:
            raise self._refusal(f"its view {header.view} is older than {view}, which this peer has installed")
        self._expect("target stage", header.target_stage, self.stage)
        self._expect("source stage", header.source_stage, sender_stage)
        direction = -1 if header.kind is FrameKind.GRADIENT else 1
        self._expect("target stage less source stage", header.target_stage - header.source_stage, direction)
        if header.step < 1:
            raise self._refusal(f"its step is {header.step}, and steps count from 1")
        microbatches = spec.batch.microbatches
        if header.kind is FrameKind.EVALUATION:
            microbatches = spec.evaluation.sequences // spec.batch.microbatch_sequences
        if not 0 <= header.microbatch < microbatches:
            raise self._refusal(f"its microbatch {header.microbatch} is not in 0..{microbatches - 1}")
        self._expect("shape", (header.batch, header.time), (spec.batch.microbatch_sequences, spec.model.context))
        if Rung(header.rank, header.dtype) not in spec.rungs:
            ladder = ", ".join(str(rung) for rung in spec.rungs)
            raise self._refusal(
                f"its rank and dtype, {header.rank} {header.dtype.value}, are not on the run's ladder ({ladder})"
            )
        if not 0 <= header.limit < len(spec.rungs):
            raise self._refusal(f"its limit {header.limit} is not in 0..{len(spec.rungs) - 1}, the rungs of the ladder")
        if header.kind is not FrameKind.GRADIENT:
            self._expect("number of peers in the route", len(header.route), spec.model.stages)
        self._expect("payload size in bytes", payload_size, payload_bytes(header, spec.model.vocab_size))
        if payload_size > MAX_FRAME_BYTES:
            raise self._refusal(f"its payload of {payload_size} bytes is above the limit of {MAX_FRAME_BYTES}")

    def _expect(self, field: str, got: object, expected: object) -> None:
        if got != expected:
            raise self._refusal(f"its {field} is {got!r}, and this peer expects {expected!r}")

    def _refusal(self, reason: str) -> FrameError:
        return FrameError(
            f"Refused a frame: {reason}.",
            meaning="Nothing of it was used; the microbatch is repeated if it is missing.",
            remedy="If it goes on, the sender runs another version or another run spec: check its log.",
        )
