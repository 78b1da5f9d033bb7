"""Rates for the people who watch."""

from __future__ import annotations

import pytest

from swarm.core.messages import Commit
from swarm.model.optimizer import learning_rate
from swarm.runtime.pace import WINDOW_STEPS, Pace
from tests.model.runs import small_run

SPEC = small_run()
TOKENS = SPEC.batch.sequences * SPEC.model.context


def commit(step: int) -> Commit:
    return Commit(step, 0.5, 2.25, 1.5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows, as its one element."""
    now_s = [100.0]
    monkeypatch.setattr("swarm.runtime.pace.time.monotonic", lambda: now_s[0])
    return now_s


def test_the_first_commit_has_no_rate_yet(clock: list[float]) -> None:
    pace = Pace(SPEC)
    event = pace.committed(commit(1))
    assert (event.step, event.steps, event.tokens) == (1, SPEC.steps, TOKENS)
    assert (event.loss, event.grad_norm, event.lr) == (2.25, 1.5, learning_rate(SPEC, 1))
    assert (event.seconds, event.tokens_per_s, event.eta_s) == (None, None, None)
    assert (pace.tokens_per_s, pace.beat_s) == (None, None)


def test_the_rate_is_the_median_so_that_one_slow_step_does_not_show(clock: list[float]) -> None:
    pace = Pace(SPEC)
    pace.committed(commit(1))
    for step, seconds in ((2, 0.5), (3, 60.0), (4, 0.5)):
        clock[0] += seconds
        event = pace.committed(commit(step))
        assert event.seconds == seconds
    assert event.tokens == 4 * TOKENS
    assert event.tokens_per_s == TOKENS / 0.5
    assert event.eta_s == (SPEC.steps - 4) * 0.5
    assert pace.beat_s == 0.5 / SPEC.batch.microbatches


def test_what_was_long_ago_is_forgotten(clock: list[float]) -> None:
    pace = Pace(SPEC)
    for step in range(2 * WINDOW_STEPS + 2):
        clock[0] += 9.0 if step <= WINDOW_STEPS else 1.0
        pace.committed(commit(step + 1))
    assert pace.tokens_per_s == TOKENS
