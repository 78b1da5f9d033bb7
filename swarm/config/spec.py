"""The immutable description of a run.

A :class:`RunSpec` says everything that two peers must agree on: the model and how it is cut, the batch, the boundary,
the optimizer, the data and the seed. Its hash is the run id, so peers that agree on the id agree on all of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from swarm.errors import SpecError

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class BoundaryKind(StrEnum):
    """How activations cross from one stage to the next (DESIGN.md section 2)."""

    DENSE = "dense"
    SUBSPACE = "subspace"
    ANCHORED = "anchored"


class WireDtype(StrEnum):
    """How one coefficient is written on the wire."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Of one coefficient."""
        return {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}[self.value]

    @property
    def scaled(self) -> bool:
        """Each token has a scale next to its coefficients."""
        return self in (WireDtype.INT8, WireDtype.INT4)


SCALE_BYTES = 2
"""int8 and int4 carry one bf16 scale per token: the gradients of a mean loss are too small for fp16."""


@dataclass(frozen=True, slots=True)
class Rung:
    """What a message may have: how many coefficients per token, and how each is written."""

    rank: int
    dtype: WireDtype

    @property
    def bytes_per_token(self) -> float:
        """Of coefficients and scales, in one direction."""
        return self.rank * self.dtype.bits / 8 + (SCALE_BYTES if self.rank and self.dtype.scaled else 0)

    def __str__(self) -> str:
        return f"{self.rank} {self.dtype.value}"

    @classmethod
    def parse(cls, text: str) -> Rung:
        """The inverse of ``str``."""
        rank, dtype = text.split()
        return cls(int(rank), WireDtype(dtype))


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(_Section):
    """A Llama-family transformer and how many stages it is cut into."""

    vocab_size: Annotated[int, Field(ge=2, le=2**31)] = 256
    d_model: Positive = 128
    layers: Positive = 6
    heads: Positive = 4
    kv_heads: Positive = 2
    ffn_dim: Annotated[int, Field(ge=0)] = 0
    """Width of the SwiGLU layer; 0 means 8/3 of d_model, rounded up to a multiple of 32."""
    context: Positive = 128
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    tied_head: bool = False
    """Share the embedding with the head; only possible where one stage has both."""
    stages: Positive = 3

    @property
    def ffn(self) -> int:
        """Width of the SwiGLU layer."""
        return self.ffn_dim or -(-8 * self.d_model // 3 // 32) * 32

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    def stage_layers(self, stage: int) -> range:
        """The global indices of the layers of ``stage``; earlier stages take the remainder."""
        base, extra = divmod(self.layers, self.stages)
        start = stage * base + min(stage, extra)
        return range(start, start + base + (stage < extra))

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"d_model/heads is {self.head_dim}, and rotary embeddings need an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.layers < self.stages:
            raise ValueError(f"layers {self.layers} are fewer than stages {self.stages}")
        if self.tied_head and self.stages > 1:
            raise ValueError(
                f"tied_head needs embedding and head on one stage, but stages is {self.stages}; "
                "set tied_head = false or stages = 1"
            )
        return self


class BatchSpec(_Section):
    """The global batch of one step."""

    sequences: Positive = 16
    microbatches: Positive = 4

    @property
    def microbatch_sequences(self) -> int:
        return self.sequences // self.microbatches

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.sequences % self.microbatches:
            raise ValueError(f"sequences {self.sequences} is not divisible by microbatches {self.microbatches}")
        return self


class BoundarySpec(_Section):
    """What crosses between two stages."""

    kind: BoundaryKind = BoundaryKind.ANCHORED
    rank: Annotated[int, Field(ge=0)] = 8
    """Highest number of coefficients per token (K); ignored by ``dense``; 0 cuts the wire (a control)."""
    ladder: tuple[Annotated[str, Field(pattern="^[0-9]{1,6} (fp32|bf16|int8|int4)$")], ...] = ()
    """Rungs that a message may have, as "rank dtype", richest first; a bare rank has ``dtype``. Empty: only the first,
    which is always ``rank`` in ``dtype``."""
    dtype: WireDtype = WireDtype.BF16
    headroom: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the time behind which transfers hide that rank control may fill."""
    learned_basis: bool = False
    """Learn E and D of each boundary (``anchored`` only); else they stay the seeded basis."""

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The ladder, richest first; never empty."""
        return tuple(Rung.parse(text) for text in self.ladder) or (Rung(self.rank, self.dtype),)

    @model_validator(mode="before")
    @classmethod
    def _bare_ranks(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = cast(dict[str, Any], fields)
        ladder = given.get("ladder")
        if not isinstance(ladder, list | tuple):
            return given
        dtype = given.get("dtype", WireDtype.BF16)
        name = dtype.value if isinstance(dtype, WireDtype) else dtype
        rungs = cast(Sequence[Any], ladder)
        return {**given, "ladder": [f"{rung} {name}" if type(rung) is int else rung for rung in rungs]}

    @model_validator(mode="after")
    def _ladder(self) -> Self:
        rungs = self.rungs
        shown = f"ladder {list(self.ladder)}"
        if any(rung.rank > self.rank for rung in rungs):
            raise ValueError(f"{shown} has a rank above rank {self.rank}")
        if any(a.bytes_per_token <= b.bytes_per_token for a, b in itertools.pairwise(rungs)):
            raise ValueError(f"{shown} is not strictly falling in bytes per token")
        if rungs[0] != Rung(self.rank, self.dtype):
            raise ValueError(f"{shown} does not begin with rank {self.rank} in {self.dtype.value}")
        if self.ladder and self.kind is BoundaryKind.DENSE:
            raise ValueError("ladder needs a compressed kind: dense has only one rung")
        if self.learned_basis and self.kind is not BoundaryKind.ANCHORED:
            raise ValueError(f"learned_basis needs kind = 'anchored', not {self.kind.value!r}")
        return self


class OptimizerSpec(_Section):
    """AdamW with linear warmup, cosine decay and a clip of the gradient norm over all stages."""

    lr: Annotated[float, Field(gt=0)] = 3e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    min_lr_share: Share = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class DataSpec(_Section):
    """Where text comes from and how it becomes token ids."""

    source: str = "stdlib"
    """``stdlib``, or a directory, a file or a glob on the machine of the head."""
    format: Annotated[str, Field(pattern="^(auto|text|jsonl|parquet)$")] = "auto"
    field: str = "text"
    tokenizer: str = "bytes"
    """``bytes``, or the path of a Hugging Face ``tokenizer.json`` on the machine of the head."""
    tokenizer_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """Filled in from the file when the run is created, so that all heads use the same tokenizer."""
    validation_share: Annotated[float, Field(gt=0, lt=0.5)] = 0.05


class EvaluationSpec(_Section):
    """Validation loss on the held-out split, at step 0, every ``every`` steps and at the end."""

    every: Annotated[int, Field(ge=0)] = 50
    sequences: Positive = 64


class CheckpointSpec(_Section):
    """Local checkpoints of each stage."""

    every: Positive = 50
    keep: Annotated[int, Field(ge=2)] = 2


class RunSpec(_Section):
    """One training job. Immutable; :attr:`run_id` is the hash of all its fields."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")] = "run"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: Positive = 400
    model: ModelSpec = ModelSpec()
    batch: BatchSpec = BatchSpec()
    boundary: BoundarySpec = BoundarySpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec = DataSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.boundary.kind is not BoundaryKind.DENSE and self.boundary.rank > self.model.d_model:
            raise ValueError(f"boundary.rank {self.boundary.rank} is above model.d_model {self.model.d_model}")
        if self.data.tokenizer == "bytes" and self.model.vocab_size < 256:
            raise ValueError(f"model.vocab_size {self.model.vocab_size} is below the 256 of data.tokenizer 'bytes'")
        if self.evaluation.sequences % self.batch.microbatch_sequences:
            raise ValueError(
                f"evaluation.sequences {self.evaluation.sequences} is not divisible by the microbatch size "
                f"{self.batch.microbatch_sequences} (batch.sequences / batch.microbatches)"
            )
        return self

    def canonical_json(self) -> str:
        """All fields, defaults included, in one canonical form: what is hashed and what enrolment hands out."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def run_id(self) -> str:
        """The first 32 hex digits of the SHA-256 of :meth:`canonical_json`."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:32]

    @property
    def wire_rank(self) -> int:
        """Coefficients per token of a full-rank message."""
        return self.model.d_model if self.boundary.kind is BoundaryKind.DENSE else self.boundary.rank

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """What a message may have, richest first."""
        if self.boundary.kind is BoundaryKind.DENSE:
            return (Rung(self.model.d_model, self.boundary.dtype),)
        return self.boundary.rungs

    @classmethod
    def parse(cls, fields: dict[str, Any], *, origin: str = "run spec") -> RunSpec:
        """Check ``fields``.

        Raises:
            SpecError: names the key and the reason.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise SpecError(
                f"{origin}: {describe(error)}.",
                meaning="The run cannot be created from it.",
                remedy="Correct the key and try again.",
            ) from None

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """The inverse of :meth:`canonical_json`."""
        return cls.parse(json.loads(text), origin="run spec received")

    @classmethod
    def load(cls, source: str | Path) -> RunSpec:
        """Read a TOML file, or the preset of that name.

        Raises:
            SpecError: no such file or preset, not TOML, or not a usable spec.
        """
        name = str(source)
        preset = resources.files("swarm.config") / "presets" / f"{name}.toml"
        if "/" not in name and preset.is_file():
            text = preset.read_text()
        else:
            try:
                text = Path(source).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise SpecError(
                    f"Cannot read the run spec {name}: {error}.",
                    remedy=f"Give the path of a TOML file, or one of the presets: {', '.join(presets())}.",
                ) from None
        try:
            fields = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{name} is not TOML: {error}.", remedy="Correct the line it names.") from None
        return cls.parse(fields, origin=name)


def describe(error: ValidationError) -> str:
    """The faults of ``error``, each as ``key: reason``."""
    parts: list[str] = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        reason = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            reason = "unknown key"
        parts.append(f"{key}: {reason}" if key else reason)
    return "; ".join(parts)


def presets() -> list[str]:
    """The names of the presets that come with the package."""
    folder = resources.files("swarm.config") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
