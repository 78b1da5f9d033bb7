"""How fast steps are committed, for the people who watch."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from swarm.config.spec import RunSpec
from swarm.core.messages import Commit
from swarm.model.optimizer import learning_rate
from swarm.observe.events import StepCommitted

WINDOW_STEPS = 32
"""Steps over which the rate is the median."""


class Pace:
    """Turns commits into :class:`StepCommitted` events with rate and remaining time."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.tokens_per_step = spec.batch.sequences * spec.model.context
        self._durations_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._last_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Over the last steps; None until two were seen."""
        return self.tokens_per_step / median(self._durations_s) if self._durations_s else None

    @property
    def beat_s(self) -> float | None:
        """Time between two microbatches, taken from the last steps; None until two were seen."""
        return median(self._durations_s) / self.spec.batch.microbatches if self._durations_s else None

    def committed(self, commit: Commit) -> StepCommitted:
        """The event of one commit, seen now."""
        now = time.monotonic()
        seconds = None if self._last_s is None else now - self._last_s
        self._last_s = now
        if seconds is not None:
            self._durations_s.append(seconds)
        rate = self.tokens_per_s
        remaining = (self.spec.steps - commit.step) * self.tokens_per_step
        return StepCommitted(
            step=commit.step,
            steps=self.spec.steps,
            loss=commit.loss,
            grad_norm=commit.grad_norm,
            lr=learning_rate(self.spec, commit.step),
            tokens=commit.step * self.tokens_per_step,
            tokens_per_s=rate,
            seconds=seconds,
            eta_s=None if rate is None else remaining / rate,
        )
