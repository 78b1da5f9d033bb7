"""Heartbeats on a virtual clock: loss, round trip, clock offset."""

import pytest

from swarm.net.heartbeat import Pulse


def conversation(*, latency_s: float, offset_s: float, beats: int = 8) -> tuple[Pulse, Pulse]:
    """Two ends that exchange a beat a second; the wall clock of the second is ``offset_s`` ahead."""
    here, there = Pulse(1.0, 0.0), Pulse(1.0, 0.0)
    for n in range(beats):
        now = float(n)
        there.take(here.beat(now, now), 500 + now + latency_s, now + latency_s + offset_s)
        back = now + 0.3
        here.take(there.beat(500 + back, back + offset_s), back + latency_s, back + latency_s)
    return here, there


def test_the_round_trip_leaves_out_the_time_a_beat_was_held():
    here, there = conversation(latency_s=0.02, offset_s=0.0)
    assert here.rtt_s == pytest.approx(0.04)
    assert there.rtt_s == pytest.approx(0.04)


def test_the_offset_of_the_other_clock_is_found():
    here, there = conversation(latency_s=0.02, offset_s=-7.5)
    assert here.clock_offset_s == pytest.approx(-7.5)
    assert there.clock_offset_s == pytest.approx(7.5)


def test_nothing_is_known_before_the_first_round_trip():
    pulse = Pulse(1.0, 0.0)
    assert (pulse.rtt_s, pulse.clock_offset_s, pulse.timeout_s) == (None, None, 3.0)


def test_silence_grows_until_something_is_heard():
    pulse = Pulse(1.0, 0.0)
    assert [pulse.silence_s(t) for t in (0.5, 1.0, 1.5, 2.0)] == [0.5, 1.0, 1.5, 2.0]
    pulse.heard(2.0)
    assert pulse.silence_s(2.5) == 0.5


def heard_with_gaps(*gaps: float) -> Pulse:
    pulse, now = Pulse(1.0, 0.0), 0.0
    for gap in (0.0, *gaps):
        now += gap
        pulse.take(pulse.beat(now, now), now, now)
    return pulse


def test_irregular_heartbeats_are_granted_more_time_within_a_bound():
    assert heard_with_gaps(*[1.0] * 30).timeout_s == 3.0
    assert heard_with_gaps(*[1.0, 2.0, 3.0] * 10).timeout_s == 2.0 + 8 * 1.0
    assert heard_with_gaps(*[1.0, 20.0, 40.0] * 10).timeout_s == 30.0


def test_time_in_which_this_process_stood_still_is_not_held_against_the_other():
    pulse = Pulse(1.0, 0.0)
    assert pulse.silence_s(0.5) == 0.5
    assert pulse.silence_s(60.5) == 0.5
    assert pulse.silence_s(61.0) == 1.0
