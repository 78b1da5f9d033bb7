"""The live view shows what somebody at a terminal asks: how far, how fast, who is missing."""

from __future__ import annotations

import dataclasses
import io
import math

import pytest
from rich.console import Console

from swarm.observe.events import (
    Event,
    InvitationIssued,
    LinkMeasured,
    PeerJoined,
    PeerLost,
    Resources,
    Started,
    Validation,
    ViewInstalled,
    Waiting,
)
from swarm.observe.live import LiveView, RunPicture, clock, sparkline
from tests.observe.test_sinks import step

STARTED = Started("peer", "ab" * 10, 1, "77c7bf1e" * 4, "demo", "cpu", ("127.0.0.1:1",))
VIEW = ViewInstalled(1, 1, {0: "a" * 20, 1: "b" * 20, 2: "c" * 20})
LINK = LinkMeasured(1, 2, "c" * 20, 1e6, 0.0123, 8, "bf16", 17.0, 256.5, 15.1, 3)


def drawn(*events: Event, width: int = 120) -> str:
    picture = RunPicture()
    for event in events:
        picture.take(event)
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(picture)
    return console.export_text()


def test_before_the_first_step() -> None:
    text = drawn(STARTED)
    assert "demo · run 77c7bf1e · stage 1 on cpu" in text
    assert "no step yet" in text
    assert "no peers yet" in text


def test_progress() -> None:
    text = drawn(STARTED, VIEW, step(10), Validation(0, 5.59), step(11), Resources(0.0042, 300 * 2**20, 0))
    for part in ("step 11 / 25", "loss 2.5000", "1,234 tokens/s", "0:42 left", "5.5900 (step 0)"):
        assert part in text
    for part in ("0:aaaaaa", "2:cccccc", "loop stall p99 4.2 ms", "memory 300 MiB"):
        assert part in text


def test_links() -> None:
    text = drawn(VIEW, step(1), LINK)
    row = next(line for line in text.splitlines() if "1 → 2" in line)
    assert " ".join(row.strip("│ ").split()) == "1 → 2 8.0 Mbit/s 12.3 ms 8 bf16 17.0 15.1x 3"


def test_a_link_that_has_carried_nothing() -> None:
    text = drawn(LinkMeasured(0, 1, "b", None, None, 0, "", 0.0, 256.5, 0.0, 0))
    row = next(line for line in text.splitlines() if "0 → 1" in line)
    assert row.count("unknown") == 2
    assert "–" in row


def test_missing_stages_are_shown_until_they_are_back() -> None:
    lost = (STARTED, VIEW, step(3), PeerLost("b" * 20, 1, "connection closed"), Waiting((1,), "stage 1 was lost"))
    assert "WAITING FOR STAGE 1: stage 1 was lost" in drawn(*lost)
    assert "1:bbbbbb" not in drawn(*lost)
    back = drawn(*lost, VIEW, step(4))
    assert "WAITING" not in back
    assert "1:bbbbbb" in back


def test_waiting_for_the_coordinator() -> None:
    assert "WAITING: no coordinator" in drawn(VIEW, Waiting((), "no coordinator: it closed"))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_it_fits_every_terminal(width: int) -> None:
    lines = drawn(STARTED, VIEW, step(10), LINK, Waiting((0,), "reason"), width=width).splitlines()
    assert max(map(len, lines)) <= width


def test_only_the_last_messages_are_kept() -> None:
    text = drawn(*(Validation(number, 1.0) for number in range(100)))
    assert "after 99 steps" in text
    assert "after 93 steps" not in text


def test_the_invitation_is_printed_whole_to_be_copied() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    view = LiveView(console)
    invitation = "swarm1." + "x" * 500
    view.emit(InvitationIssued(invitation, 0.0, 3))
    view.emit(step(1))
    view.close()
    assert invitation in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], ""),
        ([1.0, 2.0], "▁█"),
        ([8.0, 4.0, 1.0], "█▄▁"),
        ([3.0, 3.0, 3.0], "▁▁▁"),
        ([float(number) for number in range(8)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_long_sparkline_is_condensed() -> None:
    line = sparkline([float(number) for number in range(1000)], points=10)
    assert len(line) == 10
    assert line == "".join(sorted(line))
    assert (line[0], line[-1]) == ("▁", "█")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3599, "59:59"), (3723, "1:02:03"), (360000, "100:00:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_loss_that_is_not_a_number_does_not_stop_the_view() -> None:
    broken = dataclasses.replace(step(11), loss=math.nan)
    assert "loss nan" in drawn(step(10), broken, step(12), broken)


def test_peers_are_shown_as_they_come() -> None:
    assert "1:bbbbbb" in drawn(STARTED, PeerJoined("b" * 20, 1))
