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
from pathlib import Path
from typing import Any

from peers.swarm_bootstrap import complete
from peers.tables import result_table
from peers.terminal import end, event_log, run
from swarm.config.spec import RunSpec
from swarm.errors import SwarmError
from swarm.observe.events import EventLog, Result, from_json

INVITATION_DEADLINE_S = 60.0
"""Until the bootstrap has printed its invitation; importing what it needs takes seconds on a slow machine."""

STOP_DEADLINE_S = 4.0
"""After the children were told to leave; then they are killed."""

LINE_LIMIT_BYTES = 2**20


class DemoFailed(SwarmError):
    """A process of the demo ended with an error."""

    code = "demo_failed"

    def __init__(self, what: str, *, meaning: str, remedy: str, exit_code: int) -> None:
        super().__init__(what, meaning=meaning, remedy=remedy)
        self.exit_code = exit_code  # type: ignore[misc]


def run_demo(source: str, *, steps: int | None, keep: Path | None, as_json: bool) -> int:
    """Run it; returns the exit code of the process."""
    try:
        spec = complete(RunSpec.load(source))
        if steps is not None:
            spec = RunSpec.parse(spec.model_dump(mode="json") | {"steps": steps})
    except SwarmError as error:
        end(error, as_json=as_json)
    folder = Path(tempfile.mkdtemp(prefix="swarm-demo-")) if keep is None else keep
    log = event_log(as_json=as_json)
    results: list[Result] = []
    try:
        code = run(lambda: _Demo(spec, folder, log, as_json, results).run(), log, as_json=as_json)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if results and not as_json:
        result_table(results[0])
    return code


class _Demo:
    def __init__(self, spec: RunSpec, folder: Path, log: EventLog, as_json: bool, results: list[Result]) -> None:
        self.spec, self.folder, self.log, self.as_json, self.results = spec, folder, log, as_json, results
        self.children: dict[str, asyncio.subprocess.Process] = {}
        self.readers: list[asyncio.Task[None]] = []
        self.invited = asyncio.Event()
        self.errors: dict[str, dict[str, Any]] = {}
        self.result: dict[str, Any] | None = None

    async def run(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        spec_file, invitation = self.folder / "run.toml", self.folder / "invitation"
        spec_file.write_text(to_toml(self.spec))
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
        if self.result is not None:
            self._show("bootstrap", self.result)
        return 0

    async def _start(self, name: str, module: str, *arguments: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments, "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT_BYTES,
            env=environment,
            # Of its own session, so that a Ctrl-C in this terminal reaches it once, from here.
            start_new_session=True,
        )
        self.children[name] = child
        self.readers.append(asyncio.create_task(self._read(name, child), name=f"events of {name}"))

    async def _read(self, name: str, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        while line := await child.stdout.readline():
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            match fields.get("event"):
                case "invitation":
                    self.invited.set()
                case "error":
                    self.errors[name] = fields
                case "result":
                    self.result = fields
                    continue
            self._show(name, fields)

    def _show(self, name: str, fields: dict[str, Any]) -> None:
        if fields.get("event") == "invitation":
            return
        if self.as_json:
            sys.stdout.write(json.dumps({"event": fields.pop("event"), "source": name, **fields}) + "\n")
            sys.stdout.flush()
            return
        event = from_json(fields)
        if isinstance(event, Result):
            self.results.append(event)
        # Every process tells the steps; one of them is enough for the view, and links are told by their own end.
        if event is not None and (name == "bootstrap" or fields["event"] in ("checkpoint_failed", "warning", "error")):
            self.log.emit(event)

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
        what = error.get("what") or f"it was ended by signal {-code}" if code < 0 else error.get("what")
        return DemoFailed(
            f"The process {name} ended with code {code}: {what or 'see above'}",
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
            for child, wait in zip(running, waits, strict=True):
                if not wait.done():
                    with contextlib.suppress(ProcessLookupError):
                        # The child leads its own session: what it started goes with it.
                        os.killpg(child.pid, signal.SIGKILL)
            await asyncio.gather(*waits)
        for reader in self.readers:
            reader.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)


def to_toml(spec: RunSpec) -> str:
    """A spec as the TOML that ``--spec`` reads."""
    fields = spec.model_dump(mode="json")
    sections = {key: value for key, value in fields.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items() if key not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"
