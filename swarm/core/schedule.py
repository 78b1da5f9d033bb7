"""What a step consists of: pure functions of the run spec and the step number.

Slot ``step`` holds the microbatches that lead from version ``step - 1`` to ``step`` and, before them, the evaluation
of version ``step - 1``. After the last step one more slot holds only the evaluation of the final parameters.
"""

from __future__ import annotations

import math

from swarm.config.spec import RunSpec


def training_microbatches(spec: RunSpec, step: int) -> int:
    """Training microbatches of slot ``step``: M, or 0 in the slot after the last step."""
    return spec.batch.microbatches if step <= spec.steps else 0


def evaluation_microbatches(spec: RunSpec, step: int) -> int:
    """Validation microbatches of slot ``step``."""
    every, version = spec.evaluation.every, step - 1
    due = every > 0 and version <= spec.steps and (version % every == 0 or version == spec.steps)
    return spec.evaluation.sequences // spec.batch.microbatch_sequences if due else 0


def final_slot(spec: RunSpec) -> int:
    """The last slot that has any work."""
    return spec.steps + 1 if evaluation_microbatches(spec, spec.steps + 1) else spec.steps


def in_flight_limit(stages: int, microbatches: int, rtt_s: float, beat_s: float | None) -> int:
    """Microbatches that the head keeps between forward and backward: one per stage, one in reserve, and as many as the
    slowest stage could work on while messages are on their way there and back.

    Args:
        rtt_s: round trip of one link.
        beat_s: time between two microbatches at the slowest stage; None while unknown.
    """
    travelling = math.ceil((stages - 1) * rtt_s / beat_s) if beat_s else 0
    return max(1, min(microbatches, stages + 1 + travelling))


def clip_scale(squared_norm: float, clip_norm: float) -> float:
    """Factor that every gradient is multiplied by: ``min(1, clip / (norm + 1e-6))`` over all stages together.

    0 when the norm is not finite: the step is committed without an update, on every stage alike.
    """
    if not math.isfinite(squared_norm):
        return 0.0
    return min(1.0, clip_norm / (squared_norm**0.5 + 1e-6))
