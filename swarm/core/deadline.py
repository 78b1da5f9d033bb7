"""How long to wait for something that has come before: a pure function of how long it took so far."""

from __future__ import annotations

import math
from collections import deque
from statistics import median


class AdaptiveDeadline:
    """A timeout of median + k times MAD (median absolute deviation) of the last ``window`` observations.

    The median and the MAD ignore a few outliers, so one hiccup neither loosens the deadline nor trips it; a path that
    really became slower or noisier is granted more time after half a window.

    Args:
        floor_s: never wait less than this, in seconds; also the timeout before anything was observed.
        k: MADs above the median; 1.48 MAD are one standard deviation of a normal distribution.
        window: observations kept.
        ceiling_s: never wait more than this, in seconds, whatever was observed.
    """

    def __init__(self, floor_s: float, k: float = 8.0, window: int = 32, *, ceiling_s: float = math.inf) -> None:
        if not 0 < floor_s <= ceiling_s or k < 0 or window < 1:
            raise ValueError(f"no deadline from floor_s={floor_s}, ceiling_s={ceiling_s}, k={k}, window={window}")
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._k = k
        self._seen: deque[float] = deque(maxlen=window)

    def observe(self, duration_s: float) -> None:
        """It took ``duration_s`` seconds this time."""
        self._seen.append(duration_s)

    @property
    def timeout_s(self) -> float:
        """Seconds after which it counts as lost."""
        if not self._seen:
            return self._floor_s
        middle = median(self._seen)
        spread = median(abs(duration - middle) for duration in self._seen)
        return min(self._ceiling_s, max(self._floor_s, middle + self._k * spread))
