"""``swarm-peer demo``: a bootstrap and one peer per stage as processes of their own, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.swarm_bootstrap import complete
from peers.tables import result_table
from peers.terminal import PARENT, end, event_log, run
from swarm.config.spec import RunSpec
from swarm.errors import SwarmError, UsageError
from swarm.observe.events import (
    CheckpointFailed,
    Event,
    EventLog,
    FrameRefused,
    Resources,
    Result,
    Warned,
    from_json,
)

INVITATION_DEADLINE_S = 60.0
"""Until the bootstrap has printed its invitation; importing what it needs takes seconds on a slow machine."""

STOP_DEADLINE_S = 3.8
"""After the processes were told to leave; then they are killed. Shorter than what Ctrl-C may take in all."""

LINE_LIMIT_BYTES = 2**20
STDERR_LINES = 20
"""The last lines that a process wrote to stderr are shown if it fails without saying why."""


class DemoFailed(SwarmError):
    """A process of the demo ended with an error."""

    code = "demo_failed"

    def __init__(self, what: str, *, meaning: str, remedy: str, exit_code: int) -> None:
        super().__init__(what, meaning=meaning, remedy=remedy)
        self.exit_code = exit_code  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Relayed(Event):
    """An event as a process printed it, and which process that was."""

    source: str
    fields: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"event": self.fields["event"], "source": self.source} | self.fields


def run_demo(source: str, *, steps: int | None, stages: int | None, keep: Path | None, as_json: bool) -> int:
    """Run it; returns the exit code of the process."""
    try:
        fields = complete(RunSpec.load(source)).model_dump(mode="json")
        if steps is not None:
            fields["steps"] = steps
        if stages is not None:
            fields["model"]["stages"] = stages
        spec = RunSpec.parse(fields)
    except SwarmError as error:
        end(error, as_json=as_json)
    # All temporary files of all processes lie in it, so that removing it leaves nothing behind.
    scratch = Path(tempfile.mkdtemp(prefix="swarm-demo-"))
    demo = _Demo(spec, keep or scratch / "state", scratch, event_log(as_json=as_json), as_json)

    def abort() -> None:
        demo.kill()
        shutil.rmtree(scratch, ignore_errors=True)

    try:
        code = run(demo.run, demo.log, as_json=as_json, abort=abort)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    result = from_json(demo.result or {})
    if isinstance(result, Result) and not as_json:
        result_table(result)
    return code


class _Demo:
    def __init__(self, spec: RunSpec, folder: Path, scratch: Path, log: EventLog, as_json: bool) -> None:
        self.spec, self.folder, self.scratch, self.log, self.as_json = spec, folder, scratch, log, as_json
        self.children: dict[str, asyncio.subprocess.Process] = {}
        self.readers: list[asyncio.Task[None]] = []
        self.invited = asyncio.Event()
        self.errors: dict[str, dict[str, Any]] = {}
        self.stderr: dict[str, deque[str]] = {}
        self.resources: dict[str, Resources] = {}
        self.result: dict[str, Any] | None = None

    async def run(self) -> int:
        spec_file, invitation = self.folder / "run.toml", self.folder / "invitation"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            spec_file.write_text(to_toml(self.spec))
        except OSError as error:
            raise UsageError(f"The directory {self.folder} cannot be used: {error}.") from None
        try:
            await self._start(
                "bootstrap",
                "peers.swarm_bootstrap",
                *("--spec", str(spec_file), "--local", "--listen", "127.0.0.1:0", "--linger", "10s"),
                *("--invitation-file", str(invitation), "--state-dir", str(self.folder / "bootstrap")),
            )
            await self._until_invited()
            for stage in range(self.spec.model.stages):
                await self._start(
                    f"stage-{stage}",
                    "peers.swarm_peer",
                    *("join", str(invitation), "--stage", str(stage), "--local", "--threads", "1", "--background"),
                    *("--listen", "127.0.0.1:0", "--state-dir", str(self.folder / f"stage-{stage}")),
                )
            await self._until_done()
        finally:
            await self._stop()
        if self.result is None:
            raise DemoFailed(
                "The bootstrap ended without a result.",
                meaning="The run is not finished.",
                remedy="Start the demo again.",
                exit_code=1,
            )
        if self.as_json:
            self.log.emit(Relayed("bootstrap", self.result))
        return 0

    def kill(self) -> None:
        """End all processes at once; each leads its own session, so what it started goes with it."""
        for child in self.children.values():
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)

    async def _start(self, name: str, module: str, *arguments: str) -> None:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # It ends with this process, even if this one is killed, and its temporary files go with the scratch directory.
        bound = {PARENT: str(os.getpid()), "TMPDIR": str(self.scratch)}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments, "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT_BYTES,
            env=os.environ | threads | bound | {"PYTHONUNBUFFERED": "1"},
            # Of its own session, so that a Ctrl-C in this terminal reaches it once, from here.
            start_new_session=True,
        )
        self.children[name] = child
        self.stderr[name] = deque(maxlen=STDERR_LINES)
        assert child.stdout is not None
        assert child.stderr is not None
        self.readers += [
            asyncio.create_task(self._read_events(name, child.stdout), name=f"events of {name}"),
            asyncio.create_task(self._read_stderr(name, child.stderr), name=f"stderr of {name}"),
        ]

    async def _read_events(self, name: str, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            try:
                fields = json.loads(line)
                self._take(name, fields, str(fields["event"]))
            except (ValueError, KeyError, TypeError):
                self.stderr[name].append(line)  # not an event: somebody printed

    async def _read_stderr(self, name: str, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            self.stderr[name].append(line)

    def _take(self, name: str, fields: dict[str, Any], kind: str) -> None:
        match kind:
            case "invitation":
                self.invited.set()
                return
            case "result":
                self.result = fields
                return
            case "error":
                self.errors[name] = fields
        if self.as_json:
            self.log.emit(Relayed(name, fields))
            return
        event = from_json(fields)
        if isinstance(event, Resources):
            self.resources[name] = event
            event = self._together()
        # Every process tells of steps and links; one of them is enough for the view.
        elif name != "bootstrap" and not isinstance(event, CheckpointFailed | FrameRefused | Warned):
            return
        if event is not None:
            self.log.emit(event)

    def _together(self) -> Resources:
        """What all processes use: their memory, and the stall of the slowest loop."""
        each = self.resources.values()
        return Resources(
            loop_stall_p99_s=max((one.loop_stall_p99_s or 0.0 for one in each), default=None),
            rss_bytes=sum(one.rss_bytes for one in each),
            in_flight_bytes=sum(one.in_flight_bytes for one in each),
        )

    async def _until_invited(self) -> None:
        waiting = asyncio.create_task(self.invited.wait())
        child = self.children["bootstrap"]
        ended = asyncio.create_task(child.wait())
        await asyncio.wait({waiting, ended}, timeout=INVITATION_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.invited.is_set():
            ended.cancel()
            return
        if ended.done():
            await asyncio.gather(*self.readers)
            raise self._failure("bootstrap", ended.result())
        ended.cancel()
        raise DemoFailed(
            f"The bootstrap printed no invitation within {INVITATION_DEADLINE_S:.0f} s.",
            meaning="The demo was stopped.",
            remedy="Start it by hand to see why: swarm-bootstrap --spec demo --local.",
            exit_code=1,
        )

    async def _until_done(self) -> None:
        waits = {asyncio.create_task(child.wait()): name for name, child in self.children.items()}
        pending = set(waits)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.result() != 0:
                        await asyncio.wait(self.readers, timeout=1.0)
                        raise self._failure(waits[task], task.result())
        finally:
            for task in pending:
                task.cancel()
        await asyncio.gather(*self.readers)

    def _failure(self, name: str, code: int) -> DemoFailed:
        error = self.errors.get(name, {})
        reason = error.get("what") or "\n".join(self.stderr[name]) or "it did not say why."
        ended = f"with code {code}" if code >= 0 else f"by signal {-code}"
        return DemoFailed(
            f"The process {name} ended {ended}: {reason}",
            meaning=error.get("meaning") or "The demo was stopped.",
            remedy=error.get("remedy") or "",
            exit_code=code if code > 0 else 1,
        )

    async def _stop(self) -> None:
        running = [child for child in self.children.values() if child.returncode is None]
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        if running:
            waits = [asyncio.create_task(child.wait()) for child in running]
            await asyncio.wait(waits, timeout=STOP_DEADLINE_S)
            self.kill()
            await asyncio.gather(*waits)
        for reader in self.readers:
            reader.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of ``stream``; one above the limit is skipped."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\n")


def to_toml(spec: RunSpec) -> str:
    """A spec as the TOML that ``--spec`` reads."""
    fields = spec.model_dump(mode="json")
    sections = {key: value for key, value in fields.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items() if key not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"
