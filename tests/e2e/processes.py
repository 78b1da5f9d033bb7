"""A swarm as real processes on loopback, driven by a test: every process's events are read as they come."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.demo import to_toml
from swarm.config.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 60.0
"""A process imports torch and hivemind first; on two busy cores that takes a while."""

Event = dict[str, Any]


def tiny_spec(**changes: Any) -> RunSpec:
    """A model so small that a step takes milliseconds."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "steps": 20,
        "model": {"d_model": 32, "layers": 3, "heads": 2, "kv_heads": 1, "context": 32, "stages": 3},
        "batch": {"sequences": 8, "microbatches": 4},
        "boundary": {"kind": "anchored", "rank": 4, "dtype": "fp32"},
        "evaluation": {"every": 10, "sequences": 8},
        "checkpoint": {"every": 10},
        "data": {"source": str(ROOT / "swarm"), "format": "text", "validation_share": 0.2},
    }
    for key, value in changes.items():
        fields[key] = fields[key] | value if isinstance(value, dict) else value
    return RunSpec.parse(fields)


class Process:
    """One command with ``--json``; its events and stderr are collected by threads."""

    def __init__(self, *arguments: str, stdin: str | None = None) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.events: list[Event] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_events(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._changed:
                self.events.append(json.loads(line) | {"seen_at": time.monotonic()})
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        self.errors.extend(self.popen.stderr)

    def wait_for(
        self, matches: Callable[[Event], bool], deadline_s: float = START_DEADLINE_S, *, after: int = 0
    ) -> Event:
        """The first event from index ``after`` on that matches; fails with what was seen instead."""
        ends = time.monotonic() + deadline_s
        with self._changed:
            while True:
                for event in self.events[after:]:
                    if matches(event):
                        return event
                left = ends - time.monotonic()
                if left <= 0 or (self.popen.poll() is not None and not self._threads[0].is_alive()):
                    seen = [event for event in self.events if event["event"] not in ("link", "resources")][-8:]
                    raise AssertionError(f"no such event; exit {self.popen.poll()}, seen {seen}, {self.errors[-5:]}")
                self._changed.wait(min(left, 0.5))

    def kind(self, name: str, deadline_s: float = START_DEADLINE_S, *, after: int = 0) -> Event:
        """The first event of that name."""
        return self.wait_for(lambda event: event["event"] == name, deadline_s, after=after)

    def step(self, number: int, deadline_s: float = START_DEADLINE_S) -> Event:
        """The commit of step ``number`` or a later one."""
        return self.wait_for(lambda event: event["event"] == "step" and event["step"] >= number, deadline_s)

    def exit_code(self, deadline_s: float = START_DEADLINE_S) -> int:
        """Wait for the end; all events are there afterwards."""
        code = self.popen.wait(deadline_s)
        for thread in self._threads:
            thread.join(5)
        return code

    def kill(self) -> None:
        """SIGKILL, to this process alone."""
        self.popen.kill()
        self.popen.wait(5)

    def end(self) -> None:
        """Whatever it was doing: it and its session are gone afterwards."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(5)


class Swarm:
    """A bootstrap and its peers, all state under ``folder``."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.invitation = folder / "invitation"
        self.started: list[Process] = []
        (folder / "run.toml").write_text(to_toml(spec))
        self.port = 0

    def bootstrap(self, *options: str) -> Process:
        """Start (or start again) the bootstrap; returns when it has printed its invitation."""
        process = Process(
            "peers.swarm_bootstrap",
            *("--spec", str(self.folder / "run.toml"), "--local", "--listen", f"127.0.0.1:{self.port}"),
            *("--state-dir", str(self.folder / "bootstrap"), "--invitation-file", str(self.invitation)),
            *options,
        )
        self.started.append(process)
        started = process.kind("started")
        process.kind("invitation")
        self.port = int(started["addresses"][0].rsplit(":", 1)[1])
        return process

    def peer(self, stage: int, *options: str, state: str | None = None) -> Process:
        """Start (or start again, with the same state) the peer of ``stage``."""
        process = Process(
            "peers.swarm_peer",
            *("join", str(self.invitation), "--stage", str(stage), "--local", "--threads", "1"),
            *("--state-dir", str(self.folder / (state or f"stage-{stage}"))),
            *options,
        )
        self.started.append(process)
        return process

    def peers(self) -> list[Process]:
        return [self.peer(stage) for stage in range(self.spec.model.stages)]

    def end(self) -> None:
        for process in self.started:
            process.end()


def committed(process: Process) -> list[Event]:
    """The steps that a process saw committed, in the order it saw them."""
    return [event for event in process.events if event["event"] == "step"]
