"""Goodput and round-trip time of a link, from the frames it carries anyway."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

WINDOW = 15
"""Samples kept; goodput is their median, the round-trip time their minimum."""

SAMPLE_BYTES = 32 * 1024
"""Bytes of a sample; smaller observations are pooled until they have as many."""

BACK_TO_BACK_S = 1e-3
"""A frame that begins within this time after the one before was handed over follows it without a gap."""

PROBE_AFTER_S = 2.0
"""Without a new sample for so long, frames are sent in two parts, which makes each of them an observation."""

PROBE_BYTES = 4096
"""Smaller frames say nothing about goodput."""


class GoodputMeter:
    """Turns sendings and acknowledgements of one link into two numbers.

    Only bytes that had to wait for one another say how fast a path is. So what is observed is either the later chunks
    of a frame over the time since its first chunk, or a frame that left right behind another over the time since that
    one. Times come from the receiver's clock, idle time does not count, and the clocks need not agree.

    Args:
        clock: monotonic seconds of the sender.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._rtts: deque[float] = deque(maxlen=WINDOW)
        self._in_flight: dict[int, float | None] = {}  # when its last byte was handed over
        self._back_to_back: set[int] = set()
        self._handed_over_s = self._sampled_s = -math.inf
        self._pooled_bytes, self._pooled_s = 0, 0.0
        self._last: tuple[int, float] | None = None  # sequence and arrival of the frame before

    @property
    def goodput_bytes_s(self) -> float | None:
        """Median of the last samples; None before the first."""
        return median(self._samples) if self._samples else None

    @property
    def rtt_s(self) -> float | None:
        """Shortest of the last samples; None before the first."""
        return min(self._rtts) if self._rtts else None

    @property
    def in_flight(self) -> int:
        """Frames begun and neither acknowledged nor forgotten."""
        return len(self._in_flight)

    @property
    def wants_probe(self) -> bool:
        """The traffic itself has told nothing lately: send frames in two parts."""
        return self._clock() - self._sampled_s > PROBE_AFTER_S

    def begins(self, sequence: int, *, waited: bool) -> None:
        """A frame begins to leave; ``waited`` if it had to wait for credit, and so did not follow the one before."""
        self._in_flight[sequence] = None
        if not waited and self._clock() - self._handed_over_s <= BACK_TO_BACK_S:
            self._back_to_back.add(sequence)

    def sent(self, sequence: int) -> None:
        """Its last byte was handed to the stream."""
        self._handed_over_s = self._clock()
        if sequence in self._in_flight:
            self._in_flight[sequence] = self._handed_over_s

    def arrived(self, sequence: int, size: int, first_size: int, first_s: float, last_s: float) -> None:
        """The receiver has all of it; its first chunk had ``first_size`` of ``size`` bytes."""
        if sequence not in self._in_flight:
            return
        sent_s, before = self._in_flight[sequence], self._last
        if sent_s is not None:
            self._rtts.append(max(0.0, self._clock() - sent_s))
        if sequence in self._back_to_back and before is not None and before[0] == sequence - 1:
            self._observe(size, last_s - before[1])
        else:
            self._observe(size - first_size, last_s - first_s)
        self._last = (sequence, last_s)
        self.forget(sequence)

    def forget(self, sequence: int) -> None:
        """It will not be acknowledged any more."""
        self._in_flight.pop(sequence, None)
        self._back_to_back.discard(sequence)

    def reconnected(self) -> None:
        """Sequence numbers start again; what was measured stays."""
        self._in_flight.clear()
        self._back_to_back.clear()
        self._last = None

    def _observe(self, size: int, span_s: float) -> None:
        if size < PROBE_BYTES or span_s < 0:
            return
        self._pooled_bytes += size
        self._pooled_s += span_s
        if self._pooled_bytes >= SAMPLE_BYTES:
            if self._pooled_s > 0:
                self._samples.append(self._pooled_bytes / self._pooled_s)
                self._sampled_s = self._clock()
            self._pooled_bytes, self._pooled_s = 0, 0.0
