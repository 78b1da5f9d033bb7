"""What is written where: JSON lines, lines for people, and a private file without secrets."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest

from swarm.observe import sinks
from swarm.observe.events import (
    Event,
    Failed,
    InvitationIssued,
    Left,
    LinkMeasured,
    PeerLost,
    Restored,
    StepCommitted,
    Validation,
    ViewInstalled,
    Waiting,
)
from swarm.observe.sinks import FileLog, JsonLines, PlainLines, describe
from tests.observe.test_events import KINDS, sample

SECRET = "swarm1.secret"


def step(number: int, steps: int = 25) -> StepCommitted:
    return StepCommitted(
        step=number,
        steps=steps,
        loss=2.5,
        grad_norm=1.0,
        lr=1e-3,
        tokens=2048 * number,
        tokens_per_s=1234.5,
        seconds=1.7,
        eta_s=42.0,
    )


def plain(*events: Event) -> list[str]:
    stream = io.StringIO()
    log = PlainLines(stream)
    for event in events:
        log.emit(event)
    log.close()
    return stream.getvalue().splitlines()


def test_json_lines_are_one_object_each() -> None:
    stream = io.StringIO()
    log = JsonLines(stream)
    for event in (step(1), Validation(step=0, loss=float("nan")), InvitationIssued(SECRET, 0.0, 3)):
        log.emit(event)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["step", "validation", "invitation"]
    assert lines[1]["loss"] is None
    assert lines[2]["invitation"] == SECRET


def test_people_get_every_tenth_step_and_the_last() -> None:
    assert plain(*(step(number) for number in range(1, 26))) == [
        "step 10/25: loss 2.5000, 1,234 tokens/s, 42 s left",
        "step 20/25: loss 2.5000, 1,234 tokens/s, 42 s left",
        "step 25/25: loss 2.5000, 1,234 tokens/s, 42 s left",
    ]


def test_waiting_for_the_same_is_said_once() -> None:
    first, second = Waiting((1,), "stage 1 was lost: connection closed"), Waiting((1, 2), "stage 2 left")
    assert plain(first, first, second) == [
        "waiting for stage 1 (stage 1 was lost: connection closed)",
        "waiting for stage 1, 2 (stage 2 left)",
    ]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Waiting((), "no coordinator: it closed"), "waiting: no coordinator: it closed"),
        (PeerLost("ab" * 10, 1, "left: it was stopped"), "lost stage 1: left: it was stopped"),
        (ViewInstalled(7, 61, {0: "a" * 20, 1: "b" * 20}), "view 7 from step 61: 0=aaaaaaaa, 1=bbbbbbbb"),
        (Validation(50, 2.0), "validation loss after 50 steps: 2.0000"),
        (
            Restored(60, "checkpoint of step 50", 10),
            "restored step 60 from the checkpoint of step 50, 10 steps replayed",
        ),
        (Failed("refused", "It said no.", "Nothing was started.", "Ask."), "It said no. Nothing was started. Ask."),
        (Left("the run is finished"), "left: the run is finished"),
        (LinkMeasured(0, 1, "b", None, None, 8, "bf16", 17.0, 256.5, 15.1, 0), ""),
    ],
)
def test_lines_for_people(event: Event, line: str) -> None:
    assert describe(event) == line


@pytest.mark.parametrize("kind", KINDS, ids=[kind.event for kind in KINDS])
def test_every_event_can_be_described(kind: type[Event]) -> None:
    assert kind.event in ("link", "resources") or describe(sample(kind))


def test_the_file_is_private_and_has_no_invitation(tmp_path: Path) -> None:
    path = tmp_path / "state" / "events.jsonl"
    log = FileLog(path)
    log.emit(InvitationIssued(SECRET, 0.0, 3))
    log.emit(Left("done"))
    log.close()
    assert SECRET not in path.read_text()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["left"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_file_goes_on_after_a_restart(tmp_path: Path) -> None:
    for reason in ("first", "second"):
        log = FileLog(tmp_path / "events.jsonl")
        log.emit(Left(reason))
        log.close()
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert reasons == ["first", "second"]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FILE_LIMIT_BYTES", 2000)
    log = FileLog(tmp_path / "events.jsonl")
    for number in range(200):
        log.emit(Left(f"{number:04d}"))
    log.close()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.old.jsonl"]
    both = (tmp_path / "events.old.jsonl").read_text() + (tmp_path / "events.jsonl").read_text()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2100
    reasons = [json.loads(line)["reason"] for line in both.splitlines()]
    assert reasons == [f"{number:04d}" for number in range(200 - len(reasons), 200)], "the newest, without gap"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
