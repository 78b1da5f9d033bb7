"""Which peer has done what of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """What one peer has accumulated and computed of slot ``step``, by microbatch index."""

    step: int
    backwards: tuple[int, ...] = ()
    """Microbatches whose gradient this peer has accumulated, each once."""
    evaluations: tuple[int, ...] = ()
    """Validation microbatches that have passed this peer."""


def missing_everywhere(ledgers: Iterable[Ledger], step: int, training: int, evaluations: int) -> Outstanding:
    """What at least one of the peers still lacks of slot ``step``; a ledger of another step counts as empty."""
    done = set(range(training))
    evaluated = set(range(evaluations))
    for ledger in ledgers:
        current = ledger if ledger.step == step else Ledger(step)
        done &= set(current.backwards)
        evaluated &= set(current.evaluations)
    return Outstanding(
        training=tuple(index for index in range(training) if index not in done),
        evaluations=tuple(index for index in range(evaluations) if index not in evaluated),
    )


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Microbatches that the head has to drive (again)."""

    training: tuple[int, ...] = ()
    evaluations: tuple[int, ...] = ()
