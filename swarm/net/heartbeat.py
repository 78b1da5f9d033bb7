"""What heartbeats tell: whether the other side lives, how far away it is, and how far its clock is off. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarm.core.deadline import AdaptiveDeadline

FLOOR_BEATS = 3
"""Silence of fewer heartbeats than this is never a loss."""

CEILING_BEATS = 30
"""Silence of more heartbeats than this always is."""

WINDOW = 32
"""Round trips kept."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat, as sent. All times in seconds."""

    wall_s: float
    """Sender's wall clock."""
    stamp_s: float
    """Sender's monotonic clock."""
    echo_s: float
    """``stamp_s`` of the last heartbeat heard; 0 if none."""
    held_s: float
    """How long ago that was."""


class Pulse:
    """Both directions of the heartbeats of one session.

    A round trip is (now - echo - held), all on one clock; the offset of the other clock follows from the quickest round
    trip, as in NTP. Silence does not count while this process itself stood still.

    Args:
        heartbeat_s: interval between heartbeats, the same on both sides.
        now_s: monotonic clock.
        k: deviations above the median gap that are granted.
    """

    def __init__(self, heartbeat_s: float, now_s: float, *, k: float = 8.0) -> None:
        self._deadline = AdaptiveDeadline(FLOOR_BEATS * heartbeat_s, k, WINDOW, ceiling_s=CEILING_BEATS * heartbeat_s)
        self._heard_s = self._watched_s = now_s
        self._heartbeat_s = heartbeat_s
        self._last: tuple[float, float] | None = None  # stamp of their last beat, and when it came
        self._trips: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # round trip, clock offset

    @property
    def timeout_s(self) -> float:
        """Silence after which the other side counts as lost."""
        return self._deadline.timeout_s

    @property
    def rtt_s(self) -> float | None:
        """Quickest round trip lately; None before the first."""
        return min(self._trips)[0] if self._trips else None

    @property
    def clock_offset_s(self) -> float | None:
        """Their wall clock less ours, right to half of ``rtt_s``; None before the first round trip."""
        return min(self._trips)[1] if self._trips else None

    def beat(self, now_s: float, wall_s: float) -> Beat:
        """The heartbeat to send now."""
        stamp_s, came_s = self._last or (0.0, now_s)
        return Beat(wall_s, now_s, stamp_s, now_s - came_s)

    def heard(self, now_s: float) -> None:
        """Something came from the other side."""
        self._heard_s = max(self._heard_s, now_s)

    def take(self, beat: Beat, now_s: float, wall_s: float) -> None:
        """A heartbeat came."""
        self.heard(now_s)
        if self._last is not None:
            self._deadline.observe(now_s - self._last[1])
        self._last = (beat.stamp_s, now_s)
        if beat.echo_s > 0:
            trip_s = now_s - beat.echo_s - beat.held_s
            if 0 <= trip_s < CEILING_BEATS * self._heartbeat_s:
                self._trips.append((trip_s, beat.wall_s + trip_s / 2 - wall_s))

    def silence_s(self, now_s: float) -> float:
        """How long the other side has been silent; to be asked at least once per heartbeat.

        When nobody asked for longer than two heartbeats, this process stood still (stopped, suspended, starved), and
        what came meanwhile is not read yet: that time is not held against the other side.
        """
        pause_s = now_s - self._watched_s
        self._watched_s = now_s
        if pause_s > 2 * self._heartbeat_s:
            self._heard_s = min(now_s, self._heard_s + pause_s)
        return now_s - self._heard_s
