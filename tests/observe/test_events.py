"""Events say the same in JSON, and telling them never stops a run."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from typing import Any

import pytest

from swarm.observe import events
from swarm.observe.events import Event, EventLog, Left, Result, StepCommitted, Validation, ViewInstalled, from_json

SAMPLES: dict[type, Any] = {int: 3, float: 2.5, str: "text", bool: True}
KINDS = sorted(
    (
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    ),
    key=lambda kind: kind.event,
)


def sample(kind: type[Event]) -> Event:
    """An event of ``kind`` with something in every field."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        annotation = str(field.type)
        if annotation.startswith("tuple[int"):
            values[field.name] = (0, 2)
        elif annotation.startswith("tuple[str"):
            values[field.name] = ("127.0.0.1:1", "[::1]:2")
        elif annotation.startswith("Mapping"):
            values[field.name] = {0: "a", 1: "b"}
        else:
            values[field.name] = SAMPLES[{"int": int, "float": float, "str": str}[annotation.split(" ")[0]]]
    return kind(**values)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.event for kind in KINDS])
def test_an_event_comes_back_from_json(kind: type[Event]) -> None:
    event = sample(kind)
    fields = json.loads(json.dumps(event.as_json(), allow_nan=False))
    assert next(iter(fields)) == "event"
    assert fields["event"] == kind.event
    back = from_json(fields)
    assert type(back) is kind
    assert back.as_json() == event.as_json()


def test_kinds_are_told_apart_by_their_name() -> None:
    assert len({kind.event for kind in KINDS}) == len(KINDS)
    assert Event.event not in {kind.event for kind in KINDS}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_becomes_null(value: float) -> None:
    assert Validation(step=1, loss=value).as_json()["loss"] is None


def test_null_comes_back_as_what_it_was() -> None:
    back = from_json(Validation(step=1, loss=math.inf).as_json())
    assert isinstance(back, Validation)
    assert math.isnan(back.loss)


def test_stages_become_keys_of_an_object() -> None:
    assert ViewInstalled(view=1, step=1, members={0: "a"}).as_json()["members"] == {"0": "a"}


def test_the_result_has_what_scripts_read() -> None:
    names = set(sample(Result).as_json())
    assert names >= {
        "steps",
        "train_loss",
        "val_loss",
        "tokens_per_s",
        "wire_bytes_per_token",
        "dense_bytes_per_token",
        "compression",
        "peers",
        "seconds",
    }


def test_events_of_a_later_version_are_read_as_far_as_known() -> None:
    known = from_json({"event": "left", "reason": "done", "time": 1.0, "mood": "fine"})
    assert known == Left("done", time=1.0)
    assert from_json({"event": "teleported"}) is None
    assert from_json({"event": "left"}) is None, "a field without default is missing"
    assert from_json({}) is None


class Broken:
    """A sink that always fails."""

    def __init__(self) -> None:
        self.calls = 0

    def emit(self, event: Event) -> None:
        self.calls += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def test_a_failing_sink_costs_only_its_own_events(caplog: pytest.LogCaptureFixture) -> None:
    broken, kept = Broken(), Kept()
    log = EventLog(broken, kept)
    with caplog.at_level(logging.WARNING):
        log.emit(Left("one"))
        log.emit(Left("two"))
    assert [event.reason for event in kept.events if isinstance(event, Left)] == ["one", "two"]
    assert broken.calls == 2
    assert caplog.text.count("disk full") == 1, "said once, not at every step"


def test_closing_reaches_every_sink(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    EventLog(Broken(), kept).close()
    assert kept.closed
    assert "could not be closed" in caplog.text


def test_an_event_cannot_be_changed() -> None:
    event = sample(StepCommitted)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 1  # type: ignore[attr-defined]
