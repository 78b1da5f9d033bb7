"""A whole swarm in one event loop: the bootstrap and the peers as they are, with real servers, links and sessions on
loopback. Only the directory is a dict, so that no daemon has to be started, and faults happen at named points.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from swarm.config.peer import BootstrapSettings, PeerSettings
from swarm.config.spec import RunSpec
from swarm.core.frame import FrameHeader, FrameKind
from swarm.discovery import PeerRecord
from swarm.model.trainer import Inbound, Outbound, StageTrainer
from swarm.net.pipeline import PipelineService
from swarm.net.session import Session
from swarm.observe.events import Event, EventLog, InvitationIssued, Started, StepCommitted
from swarm.runtime import bootstrap as bootstrap_module
from swarm.runtime import peer as peer_module
from swarm.runtime.coordinator import CoordinatorRunner
from swarm.runtime.neighbours import Neighbours
from tests.e2e.processes import tiny_spec

DEADLINE_S = 30.0

E = TypeVar("E", bound=Event)
Point = tuple[int, FrameKind, int, int]
"""Where a frame is about to be sent: (source stage, kind, step, microbatch)."""

Fault = Callable[["ScriptedNeighbours", int, FrameHeader, memoryview], None]
"""Sends the frame, or another, or none: called in place of ``send`` with what that was given."""


def short_spec(folder: Path, **changes: Any) -> RunSpec:
    """A run of milliseconds a step, on a text of its own."""
    text = folder / "text.txt"
    text.write_text("".join(f"Line {number} of a short text, {number * number}.\n" for number in range(2000)))
    fields: dict[str, Any] = {
        "steps": 8,
        "data": {"source": str(text)},
        "evaluation": {"every": 4},
        "checkpoint": {"every": 1000},
    }
    return tiny_spec(**fields | changes)


class Events:
    """A sink whose events are waited for."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def emit(self, event: Event) -> None:
        self.seen.append(event)
        self._loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        pass

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.seen if isinstance(event, kind)]

    async def wait_for(
        self, kind: type[E], matches: Callable[[E], bool] = lambda event: True, deadline_s: float = DEADLINE_S
    ) -> E:
        """The first event of ``kind`` that matches, of those seen and those to come."""
        async with asyncio.timeout(deadline_s):
            while True:
                for event in self.of(kind):
                    if matches(event):
                        return event
                self._news.clear()
                await self._news.wait()

    @property
    def losses(self) -> dict[int, float]:
        """Of the steps committed, in the order in which they were told."""
        steps = [event.step for event in self.of(StepCommitted)]
        assert len(set(steps)) == len(steps), f"a step was committed twice: {steps}"
        return {event.step: event.loss for event in self.of(StepCommitted)}


class AddressBook:
    """In place of the directory: the records of this process, without a DHT."""

    def __init__(self) -> None:
        self.records: dict[str, PeerRecord] = {}

    async def start(self, *_: object, **__: object) -> AddressBook:
        return self

    def addresses(self) -> list[str]:
        return []

    async def publish(self, record: PeerRecord) -> None:
        self.records[record.peer_id] = record

    async def find_peer(self, peer_id: str) -> PeerRecord | None:
        return self.records.get(peer_id)

    async def withdraw(self) -> None:
        pass

    async def close(self) -> None:
        pass


class CountingTrainer(StageTrainer):
    """Counts what it computes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.computed: Counter[tuple[str, int, int]] = Counter()

    def forward(self, step: int, microbatch: int, **options: Any) -> Outbound | None:
        self.computed["forward", step, microbatch] += 1
        return super().forward(step, microbatch, **options)

    def backward(
        self, step: int, microbatch: int, *, gradient: Inbound | None = None, **options: Any
    ) -> Outbound | None:
        self.computed["backward", step, microbatch] += 1
        return super().backward(step, microbatch, gradient=gradient, **options)


class ScriptedNeighbours(Neighbours):
    """Gives the frames of named points to the faults that are written for them, each once."""

    faults: dict[Point, Fault]
    killed = False

    def send(self, target_stage: int, header: FrameHeader, payload: memoryview) -> None:
        if self.killed:
            return
        point = (self.stage, header.kind, header.step, header.microbatch)
        fault = self.faults.pop(point, None)
        if fault is None:
            self.send_now(target_stage, header, payload)
        else:
            fault(self, target_stage, header, payload)

    def send_now(self, target_stage: int, header: FrameHeader, payload: memoryview) -> None:
        """Send it, whatever the script says."""
        super().send(target_stage, header, payload)

    def close_link(self, stage: int) -> asyncio.Task[None]:
        """Begin to close the link to ``stage`` under the one who uses it."""
        return asyncio.create_task(self._by_stage[stage].link.close())


class InProcessPeer:
    """A peer as ``swarm-peer join`` runs it, and what it tells."""

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings
        self.events = Events()
        self.peer: Any = None
        self._killed = False
        self.task = asyncio.create_task(self._run(), name=f"peer of stage {settings.stage}")

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            self.peer = await peer_module._Peer.prepare(self.settings, EventLog(self.events), stack)
            try:
                await self.peer.run()
            finally:
                if self._killed:
                    await self.peer.runner.neighbours.close()
                else:
                    await self.peer.leave()

    @property
    def trainer(self) -> CountingTrainer:
        return self.peer.runner.trainer

    @property
    def peer_id(self) -> str:
        return self.peer.identity.peer_id

    def kill(self, disk: Path | None = None) -> None:
        """End it as SIGKILL does: it says nothing more. ``disk`` gets what it had written by now.

        Only exact while no checkpoint is being saved: the files are copied one after the other.
        """
        self._killed = self.peer.runner.neighbours.killed = True
        if disk is not None:
            shutil.copytree(self.settings.state_dir, disk)
        if self.peer.session is not None:
            self.peer.session._end("killed")
        self.task.cancel()

    async def ready(self) -> None:
        """Wait until it is about to open its first session."""
        await self.events.wait_for(Started)

    async def stop(self) -> None:
        """As Ctrl-C does."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=DEADLINE_S)


class InProcessSwarm:
    """A bootstrap and its peers, all state under ``folder``.

    Args:
        faults: what happens at which point; may be added to while it runs.
    """

    def __init__(self, spec: RunSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = spec
        self.folder = folder
        self.faults: dict[Point, Fault] = {}
        self.refusals: Counter[str] = Counter()
        """Frames refused, by the peer id of the sender."""
        self.peers: dict[int, InProcessPeer] = {}
        self.killed: set[int] = set()
        """Stages that a test has killed."""
        self.book = AddressBook()
        self.coordinator: CoordinatorRunner
        self.pipelines: deque[PipelineService] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(ScriptedNeighbours, "faults", self.faults, raising=False)
        for module in (bootstrap_module, peer_module):
            monkeypatch.setattr(module, "Directory", self.book)
        monkeypatch.setattr(bootstrap_module, "CoordinatorRunner", self._coordinator)
        monkeypatch.setattr(peer_module, "StageTrainer", CountingTrainer)
        monkeypatch.setattr(peer_module, "Neighbours", ScriptedNeighbours)
        monkeypatch.setattr(peer_module, "PipelineService", self._pipeline)

    def _coordinator(self, *args: Any, **options: Any) -> CoordinatorRunner:
        self.coordinator = CoordinatorRunner(*args, **options)
        return self.coordinator

    def _pipeline(self, *args: Any, **options: Any) -> PipelineService:
        self.pipelines.append(PipelineService(*args, **options))
        self.pipelines[-1].refusals = self.refusals
        return self.pipelines[-1]

    async def start(self, stages: Iterable[int] | None = None, **settings: Any) -> None:
        """Start the bootstrap (with other ``settings``) and the peers of ``stages``, by default of all."""
        basic = BootstrapSettings(
            spec=self.spec, state_dir=self.folder / "bootstrap", listen="127.0.0.1:0", local=True, linger_s=0.0
        )
        self.events = Events()
        # Without validation: certificates of a test may live shorter than those of people.
        running = bootstrap_module.serve(basic.model_copy(update=settings), EventLog(self.events))
        self.bootstrap = asyncio.create_task(running, name="bootstrap")
        self._tasks.append(self.bootstrap)
        issued = asyncio.ensure_future(self.events.wait_for(InvitationIssued))
        await asyncio.wait({issued, self.bootstrap}, return_when=asyncio.FIRST_COMPLETED)
        if self.bootstrap.done():
            issued.cancel()
            self.bootstrap.result()
        self.invitation = (await issued).invitation
        for stage in range(self.spec.model.stages) if stages is None else stages:
            self.join(stage)

    def join(self, stage: int, *, state: str | None = None) -> InProcessPeer:
        """Start a peer of ``stage`` (again, with the same state, or as another one). :attr:`peers` has the newest."""
        settings = PeerSettings(
            invitation=self.invitation,
            stage=stage,
            state_dir=self.folder / (state or f"stage-{stage}"),
            listen="127.0.0.1:0",
            device="cpu",
            threads=1,
            local=True,
        )
        peer = InProcessPeer(settings)
        self._tasks.append(peer.task)
        self.peers[stage] = peer
        return peer

    def at(self, stage: int, kind: FrameKind, step: int, microbatch: int, fault: Fault) -> None:
        """Let ``fault`` happen when ``stage`` is about to send that frame."""
        self.faults[stage, kind, step, microbatch] = fault

    def session_of(self, stage: int) -> Session:
        """The coordinator's end of the session with ``stage``."""
        return self.coordinator._sessions[self.peers[stage].peer_id]

    async def finish(self, deadline_s: float = DEADLINE_S) -> dict[int, float]:
        """Wait until the bootstrap and all peers have ended by themselves; the losses by step."""
        running: list[asyncio.Task[Any]] = []
        try:
            async with asyncio.timeout(deadline_s):
                # A peer may have been killed, and another be in its place.
                while running != (running := [self.bootstrap, *(peer.task for peer in self.peers.values())]):
                    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in running:
                if task.done():
                    task.result()
        return self.events.losses

    async def end(self) -> None:
        """Whatever it was doing: all of it has stopped afterwards."""
        for task in reversed(self._tasks):
            task.cancel()
            await asyncio.wait({task}, timeout=DEADLINE_S)
        self._monkeypatch.undo()
