"""Output that hangs, fails or is slow costs events, never the caller's time."""

from __future__ import annotations

import threading
import time

import pytest

from swarm.observe import background as background_module
from swarm.observe.background import Background
from swarm.observe.events import Event, EventLog, Left, Started, Warned
from tests.observe.test_events import Broken, Kept

STARTED = Started("peer", "abcdefghij" * 2, 1, "run", "name", "cpu", ())


class Held:
    """A sink like a full pipe: it takes nothing until it is released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.entered.set()
        assert self.released.wait(10)
        self.events.append(event)

    def close(self) -> None:
        pass


def reasons(events: list[Event]) -> list[str]:
    return [event.reason for event in events if isinstance(event, Left)]


def test_closing_writes_everything_in_order() -> None:
    kept = Kept()
    sink = Background(kept)
    for number in range(100):
        sink.emit(Left(str(number)))
    sink.close()
    assert reasons(kept.events) == [str(number) for number in range(100)]
    assert kept.closed


def test_what_comes_after_the_end_is_ignored() -> None:
    kept = Kept()
    sink = Background(kept)
    sink.close()
    sink.emit(Left("late"))
    sink.close()
    assert kept.events == []


def test_a_held_output_does_not_hold_the_caller_and_drops_the_oldest() -> None:
    held = Held()
    sink = Background(held, limit=3)
    sink.emit(Left("in the pipe"))
    assert held.entered.wait(5)
    for number in range(10):
        sink.emit(Left(str(number)))
    held.released.set()
    sink.close()
    assert reasons(held.events) == ["in the pipe", "7", "8", "9"]
    (warning,) = [event for event in held.events if isinstance(event, Warned)]
    assert (warning.code, warning.what) == ("events_dropped", "7 events were dropped here.")


def test_the_end_does_not_wait_for_a_held_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "CLOSE_DEADLINE_S", 0.05)
    held = Held()
    log = EventLog(Background(held))
    log.emit(Left("one"))
    assert held.entered.wait(5)
    began = time.monotonic()
    assert log.close() is False, "its stream must be left alone"
    assert time.monotonic() - began < 2
    held.released.set()


def test_a_broken_output_ends_in_order() -> None:
    broken = Broken()
    log = EventLog(Background(broken))
    log.emit(Left("one"))
    assert log.close() is True
    assert broken.calls == 1


def test_events_name_their_peer_once_it_is_known() -> None:
    kept = Kept()
    log = EventLog(kept)
    for event in (Left("before"), STARTED, Left("after"), Left("of another", peer="other")):
        log.emit(event)
    assert [event.as_json().get("peer") for event in kept.events] == [None, "abcdefgh", "abcdefgh", "other"]
    assert list(kept.events[2].as_json()) == ["event", "time", "peer", "reason"]
    assert list(kept.events[0].as_json()) == ["event", "time", "reason"]
