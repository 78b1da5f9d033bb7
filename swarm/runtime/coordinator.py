"""The coordinator's shell: sessions in, actions of :class:`swarm.core.coordinator.Coordinator` out."""

from __future__ import annotations

import asyncio
import time

from swarm.config.spec import RunSpec
from swarm.core.coordinator import Action, Coordinator, Expel, Note, NoteKind, Persist, Rewind, Send
from swarm.core.frame import dense_bytes_per_token
from swarm.core.messages import Hello, LinkReport
from swarm.errors import SwarmError
from swarm.net.control import decode_peer_message, encode_coordinator_message
from swarm.net.session import Session
from swarm.observe.events import (
    EventLog,
    LinkMeasured,
    PeerJoined,
    PeerLost,
    Validation,
    ViewInstalled,
    Waiting,
    Warned,
)
from swarm.runtime.commits import CommitLog
from swarm.runtime.pace import Pace

HELLO_DEADLINE_S = 10.0
"""A session that has not said hello by then is closed."""

TICK_S = 1.0


class CoordinatorRunner:
    """Runs the coordinator of one run in this process.

    Args:
        commits: decisions of earlier terms; new ones are appended to it before peers hear of them.
    """

    def __init__(self, spec: RunSpec, commits: CommitLog, log: EventLog, *, allow_restart: bool = False) -> None:
        term = commits.begin_term()
        self.spec = spec
        self.core = Coordinator(
            spec,
            commits=tuple(commits.commits.values()),
            term=term,
            # View numbers fence frames, so those of a later term are above all of an earlier one.
            number=term << 20,
            allow_restart=allow_restart,
        )
        self.finished = asyncio.Event()
        self.left = asyncio.Event()
        """Set while no peer is connected."""
        self.left.set()
        self.pace = Pace(spec)
        self.validation: tuple[int, float] | None = None
        self._commits = commits
        self._log = log
        self._sessions: dict[str, Session] = {}
        self._links: dict[tuple[str, str], LinkReport] = {}

    async def serve(self, session: Session) -> None:
        """Handle one peer's session until it ends."""
        peer_id = session.peer_id
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                hello = decode_peer_message(await anext(aiter(session)))
        except (TimeoutError, StopAsyncIteration):
            await session.close("no_hello", "The session said nothing.")
            return
        except SwarmError as error:
            await session.refuse(error)
            return
        if not isinstance(hello, Hello):
            await session.close("no_hello", "The first message of a session must be Hello.")
            return
        actions = self.core.joined(peer_id, hello, time.monotonic())
        refusal = next((action for action in actions if isinstance(action, Expel) and action.peer_id == peer_id), None)
        if refusal is not None:
            # Not seated: the session of that identity that is seated, if any, must not be touched.
            await session.refuse(refusal.error)
            return
        older = self._sessions.get(peer_id)
        self._sessions[peer_id] = session
        self.left.clear()
        if older is not None:
            await older.close("superseded", "the peer has opened another session")
        try:
            await self._execute(actions)
            async for data in session:
                await self._execute(self.core.received(peer_id, self._decode(session, data), time.monotonic()))
        except SwarmError as error:
            await session.refuse(error)
        finally:
            # Not when the same process has opened another session meanwhile, or was expelled.
            if self._sessions.get(peer_id) is session:
                del self._sessions[peer_id]
                reason = session.lost_reason or "the session ended"
                await self._execute(self.core.lost(peer_id, reason, time.monotonic()))
            if not self._sessions:
                self.left.set()

    async def tick(self) -> None:
        """Let time pass for the core; runs until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self._execute(self.core.tick(time.monotonic()))

    def _decode(self, session: Session, data: bytes):
        message = decode_peer_message(data)
        if isinstance(message, LinkReport):
            self._links[session.peer_id, message.target_peer] = message
            self._log.emit(measured(self.spec, message))
        return message

    async def _execute(self, actions: list[Action]) -> None:
        # No await between a Persist and its Sends: sessions only queue, and the log's write is one system call.
        expelled: list[Expel] = []
        for action in actions:
            match action:
                case Persist(commit=commit):
                    self._commits.commit(commit)
                case Rewind(version=version):
                    self._commits.rewind(version)
                case Send(peer_id=peer_id, message=message):
                    session = self._sessions.get(peer_id)
                    if session is not None:
                        session.send_nowait(encode_coordinator_message(message))
                case Expel():
                    expelled.append(action)
                case Note():
                    self._tell(action)
        for expel in expelled:
            session = self._sessions.pop(expel.peer_id, None)
            if session is not None:
                await session.refuse(expel.error)

    def _tell(self, note: Note) -> None:
        match note.kind:
            case NoteKind.COMMITTED if note.commit is not None:
                self._log.emit(self.pace.committed(note.commit))
            case NoteKind.VALIDATED:
                self.validation = (note.step, note.loss)
                self._log.emit(Validation(step=note.step, loss=note.loss))
            case NoteKind.VIEW if note.view is not None:
                members = {member.stage: member.peer_id for member in note.view.members}
                self._log.emit(ViewInstalled(view=note.view.number, step=note.step, members=members))
            case NoteKind.JOINED:
                self._log.emit(PeerJoined(peer_id=note.peer_id, stage=note.stage))
            case NoteKind.LOST:
                self._log.emit(PeerLost(peer_id=note.peer_id, stage=note.stage, reason=note.text))
            case NoteKind.WAITING:
                self._log.emit(Waiting(missing_stages=note.stages, reason=note.text))
            case NoteKind.FINISHED:
                self.finished.set()
            case NoteKind.REWOUND:
                self._log.emit(Warned("rewound", f"The run goes back to step {note.step}: {note.text}.", "", ""))
            case NoteKind.STALLED:
                self._log.emit(
                    Warned(
                        "stalled",
                        f"Stalled: {note.text}.",
                        "A new view is formed and what is missing is repeated.",
                        "If it happens again, look at the log of the stages named.",
                    )
                )
            case _:
                pass

    def links(self) -> list[LinkReport]:
        """The newest report of every link of the members."""
        members = set(self.core.members.values())
        return [report for (source, target), report in self._links.items() if {source, target} <= members]

    def wire_bytes_per_token(self) -> float:
        """Mean over the boundaries of the bytes per token that crossed it, both directions."""
        by_boundary: dict[int, dict[int, float]] = {}
        for report in self._links.values():
            boundary = min(report.source_stage, report.target_stage)
            if report.bytes_per_token:
                by_boundary.setdefault(boundary, {})[report.source_stage] = report.bytes_per_token
        totals = [sum(directions.values()) for directions in by_boundary.values()]
        return sum(totals) / len(totals) if totals else 0.0


def measured(spec: RunSpec, report: LinkReport) -> LinkMeasured:
    """A link report as the event that people see; compression counts this direction against dense bf16."""
    dense = dense_bytes_per_token(spec) / 2
    return LinkMeasured(
        source_stage=report.source_stage,
        target_stage=report.target_stage,
        peer_id=report.target_peer,
        goodput_bytes_s=None if report.goodput_bytes_s < 0 else report.goodput_bytes_s,
        rtt_s=None if report.rtt_s < 0 else report.rtt_s,
        rank=report.rank,
        dtype=report.dtype,
        bytes_per_token=report.bytes_per_token,
        dense_bytes_per_token=dense,
        compression=dense / report.bytes_per_token if report.bytes_per_token else 0.0,
        queued_frames=report.queued_frames,
    )
