"""How long the event loop is away: the lateness of a timer that should fire every 10 ms."""

from __future__ import annotations

import asyncio
import time
from collections import deque

INTERVAL_S = 0.01
WINDOW = 3000
"""Samples kept: the last 30 s."""


class LoopMeter:
    """Measures stalls of the running loop between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._handle: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        self._sleep(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def reset(self) -> None:
        """Forget the samples so far: starting up is not what is measured."""
        self._samples.clear()

    @property
    def p99_s(self) -> float | None:
        """99th percentile of the lateness, over the last 30 s; None before the first sample."""
        return percentile(self._samples, 0.99)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._samples.append(max(0.0, time.monotonic() - self._due_s))
        self._sleep(loop)

    def _sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not the loop's own clock: uvloop's stands still within an iteration and counts whole milliseconds.
        self._due_s = time.monotonic() + INTERVAL_S
        self._handle = loop.call_later(INTERVAL_S, self._fire, loop)


def percentile(samples: deque[float], share: float) -> float | None:
    """The smallest sample that at least ``share`` of them do not exceed."""
    if not samples:
        return None
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
