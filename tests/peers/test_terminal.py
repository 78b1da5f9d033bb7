"""What a process does with errors and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peers.terminal import event_log, run
from swarm.errors import UnreachableError
from swarm.observe.events import EventLog, Left

ROOT = Path(__file__).resolve().parents[2]

WAITS = """
import asyncio, sys
from peers.terminal import event_log, run
from swarm.observe.events import Left
log = event_log(as_json=True)
async def main():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await {leaving}
        log.emit(Left("in order"))
sys.exit(run(main, log, as_json=True))
"""


def started(leaving: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(leaving=leaving)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_exit_code_is_that_of_the_run() -> None:
    async def main() -> int:
        return 7

    assert run(main, EventLog(), as_json=False) == 7


def test_an_error_becomes_an_event_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> int:
        raise UnreachableError("Nobody answers.", meaning="It was not started.", remedy="Look at the network.")

    assert run(main, event_log(as_json=True), as_json=True) == 3
    out, err = capsys.readouterr()
    error = json.loads(out)
    assert (error["event"], error["code"], error["what"]) == ("error", "unreachable", "Nobody answers.")
    assert err == ""
    assert run(main, EventLog(), as_json=False) == 3
    assert capsys.readouterr().err == (
        "Error: Nobody answers.\n       It was not started.\n       Look at the network.\n"
    )


def test_events_are_kept_in_the_state_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = event_log(as_json=False, folder=tmp_path)
    log.emit(Left("done"))
    log.close()
    assert capsys.readouterr().out == "left: done\n"
    assert json.loads((tmp_path / "events.jsonl").read_text())["reason"] == "done"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_the_first_signal_leaves_in_order(number: signal.Signals, code: int) -> None:
    process = started("asyncio.sleep(0.05)")
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert json.loads(out)["reason"] == "in order"
    assert process.returncode == code


def test_the_second_ctrl_c_quits_at_once() -> None:
    process = started("asyncio.sleep(60)")
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < 4:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert process.wait(5) == 130
    assert time.monotonic() - began < 4, "not only when leaving has taken too long"
    assert process.communicate()[0] == ""


def test_leaving_has_a_deadline() -> None:
    process = started("asyncio.sleep(60)")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(8) == 128 + signal.SIGTERM
    assert 4 < time.monotonic() - began < 6.5
    assert process.communicate()[0] == ""


def test_grpc_is_quiet_in_commands() -> None:
    assert os.environ["GRPC_VERBOSITY"] == "NONE"


def test_handlers_are_put_back() -> None:
    async def main() -> int:
        assert signal.getsignal(signal.SIGINT) is not before
        return 0

    before = signal.getsignal(signal.SIGINT)
    run(main, EventLog(), as_json=True)
    assert signal.getsignal(signal.SIGINT) is before


CLOSES = """
import asyncio, sys, time
from peers.terminal import run
from swarm.observe.events import EventLog
class Slow:
    def emit(self, event): pass
    def close(self):
        print("closing", flush=True)
        time.sleep(3)
async def main():
    print("ready", flush=True)
    await asyncio.Event().wait()
sys.exit(run(main, EventLog(Slow()), as_json=True))
"""


def test_a_second_signal_while_the_log_is_closed_quits_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", CLOSES], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "closing\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130


IMPORTS = """
import asyncio, sys, time
from peers.terminal import run
from swarm.observe.events import EventLog
async def main():
    print("ready", flush=True)
    for _ in range({turns}):
        time.sleep(0.01)  # as an import does, which never gives the loop a turn
    await asyncio.Event().wait()
sys.exit(run(main, EventLog(), as_json=True))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGTERM, 0)])
def test_a_signal_during_imports_counts(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTS.format(turns=50)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == code


def test_a_second_signal_during_imports_quits_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTS.format(turns=300)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # the kernel merges signals that are pending
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert time.monotonic() - began < 2.5, "the imports take 3 s"


TALKS = """
import sys
from peers.terminal import event_log, finish, run
from swarm.observe.events import Left
log = event_log(as_json=True)
async def main():
    for _ in range(10_000):
        log.emit(Left("x" * 1000))
    return 5
finish(run(main, log, as_json=True))
"""


def test_a_reader_that_is_gone_changes_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TALKS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(10) == 5
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert errors == "Events can no longer be written by JsonLines: [Errno 32] Broken pipe\n"


def test_a_reader_that_does_not_read_changes_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", TALKS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.wait(10) == 5
    process.communicate()
