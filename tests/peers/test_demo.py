"""The demo runs everything on this machine, says why it fails, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from peers.demo import to_toml
from swarm.config.spec import RunSpec
from tests.e2e.processes import tiny_spec

ROOT = Path(__file__).resolve().parents[2]


class Demo:
    """``swarm-peer demo`` with a temporary directory of its own, which has a short path for the sake of sockets."""

    def __init__(self, folder: Path, spec: RunSpec, *options: str, stdout: Any = subprocess.PIPE) -> None:
        self.temporary = folder / "t"
        self.temporary.mkdir()
        (folder / "run.toml").write_text(to_toml(spec))
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "peers.swarm_peer", "demo", "--spec", str(folder / "run.toml"), *options],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def until(self, kind: str) -> dict[str, Any]:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            event = json.loads(line)
            if event["event"] == kind:
                return event
        raise AssertionError(f"no {kind}: {self.popen.communicate()}")

    def left_behind(self) -> list[Path]:
        return list(self.temporary.iterdir())


@pytest.fixture
def demos(tmp_path: Path) -> Iterator[Any]:
    started: list[Demo] = []

    def start(*arguments: Any, **options: Any) -> Demo:
        started.append(Demo(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for demo in started:
        if demo.popen.poll() is None:
            # What it started leads sessions of its own.
            for process in [*demo.family(), psutil.Process(demo.popen.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        demo.popen.communicate()


def assert_gone(family: list[psutil.Process], within_s: float = 1.0) -> None:
    _, left = psutil.wait_procs(family, timeout=within_s)
    # An orphan that nobody asks for its exit code has ended all the same.
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


def test_events_of_all_processes_end_with_the_result(demos: Any) -> None:
    demo = demos(tiny_spec(steps=10), "--json", "--steps", "3", "--peers", "2")
    out, err = demo.popen.communicate(timeout=120)
    assert demo.popen.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert all(next(iter(event)) == "event" for event in events)
    assert {event["source"] for event in events} == {"bootstrap", "stage-0", "stage-1"}
    assert "invitation" not in {event["event"] for event in events}, "a secret"
    steps = [event["step"] for event in events if event["event"] == "step" and event["source"] == "bootstrap"]
    assert steps == [1, 2, 3]
    assert [event["event"] for event in events].count("result") == 1
    result = events[-1]
    assert (result["event"], result["steps"], result["peers"]) == ("result", 3, 2)
    assert 0 < result["train_loss"] < 6
    assert 0 < result["val_loss"] < 6
    assert result["compression"] == pytest.approx(result["dense_bytes_per_token"] / result["wire_bytes_per_token"])
    assert demo.left_behind() == []


def test_a_process_that_fails_ends_the_demo_with_its_error_and_code(demos: Any, tmp_path: Path) -> None:
    spec = tiny_spec(data={"source": str(tmp_path / "nothing")})
    demo = demos(spec, "--json", "--peers", "1")
    error: dict[str, Any] = {}
    while error.get("source") or not error:
        error = demo.until("error")
    demo.popen.communicate(timeout=20)
    assert demo.popen.returncode == 2
    assert error["code"] == "demo_failed"
    assert error["what"].startswith("The process stage-0 ended with code 2: ")
    assert "nothing" in error["what"]
    assert demo.left_behind() == []


def test_a_second_ctrl_c_ends_everything_at_once(demos: Any) -> None:
    demo = demos(tiny_spec(steps=100_000), "--json", "--peers", "1")
    demo.until("step")
    family = demo.family()
    assert len(family) == 4, "two processes, each with its DHT daemon"
    pressed = time.monotonic()
    for _ in range(2):
        demo.popen.send_signal(signal.SIGINT)
        time.sleep(0.1)  # the kernel merges signals that are pending
    demo.popen.communicate(timeout=10)
    assert demo.popen.returncode == 130
    assert time.monotonic() - pressed < 2
    assert_gone(family)
    assert demo.left_behind() == []


def test_a_killed_demo_takes_its_processes_along(demos: Any) -> None:
    demo = demos(tiny_spec(steps=100_000), "--json", "--peers", "1")
    demo.until("started")
    family = demo.family()
    demo.popen.kill()
    assert_gone(family, within_s=15)


def test_output_that_nobody_reads_does_not_stop_it(demos: Any) -> None:
    read, write = os.pipe()
    # So full that not one event fits any more.
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    demo = demos(tiny_spec(steps=3), "--json", "--peers", "1", stdout=write)
    os.close(write)
    try:
        assert demo.popen.wait(120) == 0
        assert demo.left_behind() == []
    finally:
        os.close(read)
