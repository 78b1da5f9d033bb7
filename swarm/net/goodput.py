"""Goodput and round-trip time of a link, from the frames it carries anyway."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

WINDOW = 15
"""Samples kept; goodput is their median, the round-trip time their minimum."""

SAMPLE_BYTES = 32 * 1024
"""Least bytes of a sample: fewer arrive in one burst, whatever the path carries."""


class GoodputMeter:
    """Turns sendings and acknowledgements of one link into two numbers.

    Only bytes that had to wait for one another say how fast a path is. So a sample is either the later chunks of one
    frame over the time since its first chunk, or frames that left back to back over the time since the frame before.
    Times come from the receiver's clock, idle time does not count, and the clocks need not agree.

    Args:
        clock: monotonic seconds of the sender.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._rtts: deque[float] = deque(maxlen=WINDOW)
        self._in_flight: dict[int, float | None] = {}  # when its last byte was handed over
        self._back_to_back: set[int] = set()
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

    def begins(self, sequence: int, *, back_to_back: bool) -> None:
        """A frame begins to leave; ``back_to_back`` if it only waited for the frame before it."""
        self._in_flight[sequence] = None
        if back_to_back:
            self._back_to_back.add(sequence)

    def sent(self, sequence: int) -> None:
        """Its last byte was handed to the stream."""
        if sequence in self._in_flight:
            self._in_flight[sequence] = self._clock()

    def arrived(self, sequence: int, size: int, first_size: int, first_s: float, last_s: float) -> None:
        """The receiver has all of it; its first chunk had ``first_size`` of ``size`` bytes."""
        if sequence not in self._in_flight:
            return
        sent_s = self._in_flight[sequence]
        if sent_s is not None:
            self._rtts.append(max(0.0, self._clock() - sent_s))
        before = self._last
        if size - first_size >= SAMPLE_BYTES:
            self._sample(size - first_size, last_s - first_s)
        elif sequence in self._back_to_back and before is not None and before[0] == sequence - 1:
            self._pooled_bytes += size
            self._pooled_s += last_s - before[1]
            if self._pooled_bytes >= SAMPLE_BYTES:
                self._sample(self._pooled_bytes, self._pooled_s)
                self._pooled_bytes, self._pooled_s = 0, 0.0
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

    def _sample(self, size: int, span_s: float) -> None:
        if span_s > 0:
            self._samples.append(size / span_s)
