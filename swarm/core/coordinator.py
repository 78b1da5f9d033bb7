"""The coordinator's decisions: membership, views, commits. No I/O; the shell executes the actions in order.

Phases of a view::

    WAITING --all stages hosted--> COLLECTING --all states--> INSTALLING --all installed--> RUNNING --> FINISHED
       ^                               |                          |                            |
       +---------- a member is lost ---+--------------------------+----------------------------+

A commit is decided once: :class:`Persist` precedes the :class:`Send` of its ``Apply``, so a coordinator that is
killed between the two finds the decision on disk, and the peers, which promised in ``Prepared`` to be able to apply
the step, get it with the next view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from swarm.config.spec import RunSpec
from swarm.core.frame import PROTOCOL_VERSION
from swarm.core.ledger import missing_everywhere
from swarm.core.messages import (
    Apply,
    Begin,
    CannotInstall,
    Collect,
    Collected,
    Commit,
    CoordinatorMessage,
    Disturbed,
    Evaluated,
    Finished,
    Goodbye,
    Hello,
    Install,
    Installed,
    LinkReport,
    PeerMessage,
    PeerState,
    Prepared,
    Span,
    Validated,
    Waiting,
)
from swarm.core.schedule import clip_scale, evaluation_microbatches, final_slot, training_microbatches
from swarm.core.view import Member, View
from swarm.errors import IdentityInUseError, RefusedError, SwarmError

INSTALL_SILENCE_S = 60.0
"""A member that says nothing for this long while a view is formed is dropped (it says ``Installing`` every second)."""

STALL_FLOOR_S = 20.0
"""No step is called stalled before this long; above it the deadline follows the steps already seen."""

MAX_DOUBLINGS = 10

DISTURBED_QUIET_S = 0.5
"""A link that fails within this time of a new view is answered by the next one only then, so that a bad link does not
keep everybody forming views."""


class Phase(Enum):
    """Where the coordinator stands with the current view."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    INSTALLING = "installing"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``peer_id``."""

    peer_id: str
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the decision to disk before executing any later action."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Rewind:
    """Committed steps above ``version`` are given up; write that to disk before executing any later action."""

    version: int


@dataclass(frozen=True, slots=True)
class Expel:
    """End the session of ``peer_id`` and tell it why."""

    peer_id: str
    error: SwarmError


class NoteKind(Enum):
    """What people are told."""

    VIEW = "view"
    WAITING = "waiting"
    JOINED = "joined"
    LOST = "lost"
    COMMITTED = "committed"
    VALIDATED = "validated"
    REWOUND = "rewound"
    STALLED = "stalled"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the event log. Fields that do not apply keep their defaults."""

    kind: NoteKind
    text: str = ""
    peer_id: str = ""
    stage: int = -1
    step: int = 0
    stages: tuple[int, ...] = ()
    loss: float = 0.0
    commit: Commit | None = None
    view: View | None = None


Action = Send | Persist | Rewind | Expel | Note


@dataclass(slots=True)
class _Seat:
    """A connected peer, from the coordinator's side."""

    peer_id: str
    stage: int
    state: PeerState
    instance: str = ""
    collected_view: int = 0
    installed_view: int = 0
    heard_at_s: float = 0.0
    prepared: Prepared | None = None
    lost_versions: set[int] = field(default_factory=set[int])
    links: dict[str, LinkReport] = field(default_factory=dict[str, LinkReport])


class Coordinator:
    """Issues views and commits steps for a run with one replica per stage.

    Args:
        spec: the run.
        commits: the decisions found on disk, in order of their steps.
        term: this coordinator's term, above every term before it.
        number: the highest view number that may have been used before.
        allow_restart: accept a roll-back to version 0 although steps were committed.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        commits: Sequence[Commit] = (),
        term: int = 1,
        number: int = 0,
        allow_restart: bool = False,
    ) -> None:
        self.spec = spec
        self.run_id = spec.run_id
        self.term = term
        self.number = number
        self.commits: dict[int, Commit] = {commit.step: commit for commit in commits}
        self.committed = max(self.commits, default=0)
        """The highest committed step."""
        self.phase = Phase.WAITING
        self.view: View | None = None
        self.allow_restart = allow_restart
        self.losses: dict[int, float] = {}
        self._seats: dict[str, _Seat] = {}
        self._phase_since_s = 0.0
        self._last_commit_s: float | None = None
        self._step_times_s: list[float] = []
        self._stalls = 0
        self._disturbance = ""
        """Why this view has to be replaced as soon as it may be."""
        self._corpus_digest = ""

    # what the shell may look at

    @property
    def missing_stages(self) -> tuple[int, ...]:
        hosted = {seat.stage for seat in self._seats.values()}
        return tuple(stage for stage in range(self.spec.model.stages) if stage not in hosted)

    @property
    def members(self) -> dict[int, str]:
        """Stage to peer id of everybody connected."""
        return {seat.stage: seat.peer_id for seat in sorted(self._seats.values(), key=lambda seat: seat.stage)}

    @property
    def links(self) -> list[LinkReport]:
        """The newest report of every link."""
        return [report for seat in self._seats.values() for report in seat.links.values()]

    # events

    def joined(self, peer_id: str, hello: Hello, now_s: float) -> list[Action]:
        """A peer opened a session and said hello."""
        seat = self._seats.get(peer_id)
        if seat is not None and hello.instance and seat.instance == hello.instance and seat.stage == hello.stage:
            # The same process has lost its session and opened another before the loss was noticed here.
            del self._seats[peer_id]
        refusal = self._refusal(peer_id, hello)
        if refusal is not None:
            return [Expel(peer_id, refusal)]
        if hello.corpus_digest:
            self._corpus_digest = hello.corpus_digest
        self._seats[peer_id] = _Seat(peer_id, hello.stage, hello.state, hello.instance, heard_at_s=now_s)
        note = Note(NoteKind.JOINED, peer_id=peer_id, stage=hello.stage)
        if self.phase is Phase.FINISHED:
            return [note, Send(peer_id, Finished(self.spec.steps))]
        return [note, *self._change_membership(now_s, f"stage {hello.stage} joined")]

    def lost(self, peer_id: str, reason: str, now_s: float) -> list[Action]:
        """The session of a peer ended."""
        seat = self._seats.pop(peer_id, None)
        if seat is None:
            return []
        note = Note(NoteKind.LOST, text=reason, peer_id=peer_id, stage=seat.stage)
        if self.phase is Phase.FINISHED:
            return [note]
        return [note, *self._change_membership(now_s, f"stage {seat.stage} was lost: {reason}")]

    def received(self, peer_id: str, message: PeerMessage, now_s: float) -> list[Action]:
        """A member said something."""
        seat = self._seats.get(peer_id)
        if seat is None:
            return []
        seat.heard_at_s = now_s
        match message:
            case Collected(view=number, state=state) if number == self.number and self.phase is Phase.COLLECTING:
                seat.state, seat.collected_view = state, number
                return self._install_if_collected(now_s)
            case Installed(view=number) if number == self.number and self.phase is Phase.INSTALLING:
                seat.installed_view = number
                return self._begin_if_installed(now_s)
            case CannotInstall(view=number, reason=reason) if number == self.number:
                if self.view is not None:
                    seat.lost_versions.add(self.view.version)
                return self._change_membership(now_s, f"stage {seat.stage} could not restore: {reason}")
            case Prepared(view=number) if number == self.number and self.phase is Phase.RUNNING:
                seat.prepared = message
                return self._commit_if_prepared(now_s)
            case Evaluated(view=number, step=step, loss=loss) if number == self.number:
                return self._validated(step, loss)
            case Disturbed(view=number, neighbour=neighbour, reason=reason) if number == self.number:
                self._disturbance = f"the link to {neighbour} failed: {reason}"
                return self._answer_disturbance(now_s)
            case LinkReport():
                seat.links[message.target_peer] = message
                return []
            case Goodbye(reason=reason):
                return self.lost(peer_id, f"left: {reason}", now_s)
            case _:
                return []

    def tick(self, now_s: float) -> list[Action]:
        """Time passed: drop members that do not form the view, report a stalled step."""
        actions: list[Action] = []
        if self.phase in (Phase.COLLECTING, Phase.INSTALLING):
            for seat in list(self._seats.values()):
                answered = seat.collected_view if self.phase is Phase.COLLECTING else seat.installed_view
                silent_s = now_s - max(seat.heard_at_s, self._phase_since_s)
                if answered != self.number and silent_s > INSTALL_SILENCE_S:
                    error = RefusedError(
                        f"Stage {seat.stage} said nothing for {silent_s:.0f} s while view {self.number} was formed.",
                        meaning="The run goes on when the stage is hosted again.",
                        remedy="Join again; look at this peer's log for what it was doing.",
                    )
                    actions += [Expel(seat.peer_id, error), *self.lost(seat.peer_id, error.what, now_s)]
        actions += self._answer_disturbance(now_s)
        if self.phase is Phase.RUNNING:
            since = max(self._phase_since_s, self._last_commit_s or 0.0)
            if now_s - since > self.stall_deadline_s:
                self._stalls += 1
                late = [seat.stage for seat in self._seats.values() if not self._is_prepared(seat)]
                text = f"step {self.committed + 1} has taken {now_s - since:.0f} s; not prepared: stages {sorted(late)}"
                actions.append(Note(NoteKind.STALLED, text=text, stages=tuple(sorted(late)), step=self.committed + 1))
                actions += self._change_membership(now_s, "the step stalled")
        return actions

    @property
    def stall_deadline_s(self) -> float:
        """When a step counts as stalled: ten times the slowest of the last steps, with a floor.

        Doubled each time it passes without a commit in between, so that a run whose steps just take long is let be.
        """
        return max(STALL_FLOOR_S, 10 * max(self._step_times_s, default=0.0)) * 2 ** min(self._stalls, MAX_DOUBLINGS)

    # decisions

    def _refusal(self, peer_id: str, hello: Hello) -> RefusedError | None:
        stages = self.spec.model.stages
        if hello.protocol != PROTOCOL_VERSION:
            return RefusedError(
                f"This peer speaks protocol {hello.protocol}, the run speaks {PROTOCOL_VERSION}.",
                meaning="It cannot take part.",
                remedy="Install the version of swarm that the run's owner uses.",
            )
        if hello.run_id != self.run_id:
            return RefusedError(
                f"This peer has run {hello.run_id}, the coordinator has run {self.run_id}.",
                meaning="Their run specs differ, so their gradients would not fit together.",
                remedy="Join with an invitation of this run and a state directory of its own.",
            )
        if not 0 <= hello.stage < stages:
            return RefusedError(
                f"There is no stage {hello.stage} in this run.",
                meaning="The peer was not admitted.",
                remedy=f"Choose a stage from 0 to {stages - 1}.",
            )
        for seat in self._seats.values():
            if seat.peer_id == peer_id:
                return IdentityInUseError(
                    f"Peer {peer_id} is already connected, hosting stage {seat.stage}.",
                    meaning="Two processes with one identity would undo each other's work; the later one is refused.",
                    remedy="Give the second process a --state-dir of its own.",
                )
            if seat.stage == hello.stage:
                missing = self.missing_stages
                free = (
                    f"Stages without a peer: {', '.join(map(str, missing))}." if missing else "All stages are hosted."
                )
                return RefusedError(
                    f"Stage {hello.stage} is already taken by peer {seat.peer_id}.",
                    meaning="The run goes on without this peer.",
                    remedy=free,
                )
        if hello.corpus_digest and self._corpus_digest and hello.corpus_digest != self._corpus_digest:
            return RefusedError(
                f"This peer's text has the digest {hello.corpus_digest[:16]}, the run began with "
                f"{self._corpus_digest[:16]}.",
                meaning="The head would draw other microbatches than before.",
                remedy="Use the same files (and, for 'stdlib', the same version of Python).",
            )
        return None

    def _answer_disturbance(self, now_s: float) -> list[Action]:
        quiet = self.phase is not Phase.RUNNING or now_s - self._phase_since_s < DISTURBED_QUIET_S
        return [] if quiet or not self._disturbance else self._change_membership(now_s, self._disturbance)

    def _change_membership(self, now_s: float, reason: str) -> list[Action]:
        self.number += 1
        self._disturbance = ""
        self._phase_since_s = now_s
        self.view = None
        for seat in self._seats.values():
            seat.prepared = None
        missing = self.missing_stages
        if missing:
            self.phase = Phase.WAITING
            waiting = Waiting(missing, reason)
            note = Note(NoteKind.WAITING, text=reason, stages=missing)
            return [note, *(Send(seat.peer_id, waiting) for seat in self._seats.values())]
        self.phase = Phase.COLLECTING
        return [Send(seat.peer_id, Collect(self.number)) for seat in self._seats.values()]

    def _install_if_collected(self, now_s: float) -> list[Action]:
        seats = sorted(self._seats.values(), key=lambda seat: seat.stage)
        if any(seat.collected_view != self.number for seat in seats):
            return []
        version = self._common_version(seats)
        if version == 0 and self.committed > 0 and not self.allow_restart:
            return self._refuse_restart(seats, now_s)
        rollback = version < self.committed
        # Above what is on disk here only after a power cut: a peer applies nothing that was not committed.
        self.committed = version
        actions: list[Action] = []
        if rollback:
            self.commits = {step: commit for step, commit in self.commits.items() if step <= version}
            text = f"the newest step that all stages have is {version}"
            actions += [Rewind(version), Note(NoteKind.REWOUND, text=text, step=version)]
        members = tuple(Member(seat.stage, seat.peer_id) for seat in seats)
        self.view = View(self.term, self.number, version + 1, members)
        self.phase, self._phase_since_s = Phase.INSTALLING, now_s
        oldest = min(seat.state.version for seat in seats)
        commits = tuple(self.commits[step] for step in range(oldest + 1, version + 1) if step in self.commits)
        install = Install(self.view, commits, rollback)
        return [*actions, *(Send(seat.peer_id, install) for seat in seats)]

    def _refuse_restart(self, seats: list[_Seat], now_s: float) -> list[Action]:
        empty = [seat for seat in seats if not self._reachable(seat, {self.committed})]
        actions: list[Action] = []
        for seat in empty:
            error = RefusedError(
                f"The run is at step {self.committed}, and this peer has nothing of stage {seat.stage} to go on from.",
                meaning="Admitting it would throw all committed steps away.",
                remedy="Start the peer with the state directory of the one that hosted the stage, or let the run's "
                "owner restart the bootstrap with --allow-restart.",
            )
            actions += [Expel(seat.peer_id, error), *self.lost(seat.peer_id, error.what, now_s)]
        return actions

    def _reachable(self, seat: _Seat, versions: set[int]) -> set[int]:
        state = seat.state
        spans = [*state.restorable, Span(0, 0), Span(state.version, state.version)]
        if state.prepared_step == state.version + 1 and state.prepared_step in self.commits:
            spans.append(Span(state.prepared_step, state.prepared_step))
        return {
            version
            for version in versions
            if version not in seat.lost_versions and any(span.first <= version <= span.last for span in spans)
        }

    def _common_version(self, seats: list[_Seat]) -> int:
        highest = max(self.committed, *(seat.state.version for seat in seats))
        versions = set(range(highest + 1))
        for seat in seats:
            versions = self._reachable(seat, versions)
        return max(versions, default=0)

    def _begin_if_installed(self, now_s: float) -> list[Action]:
        view = self.view
        if view is None or any(seat.installed_view != self.number for seat in self._seats.values()):
            return []
        self.phase, self._phase_since_s = Phase.RUNNING, now_s
        self._last_commit_s = None
        step = view.first_step
        outstanding = missing_everywhere(
            # A peer that had to restore another version says so by the step of its ledger.
            (seat.state.ledger for seat in self._seats.values()),
            step,
            training_microbatches(self.spec, step),
            evaluation_microbatches(self.spec, step),
        )
        begin = Begin(view.number, step, outstanding.training, outstanding.evaluations)
        note = Note(NoteKind.VIEW, view=view, step=step)
        if step > final_slot(self.spec):
            return [note, *self._finish()]
        return [note, *(Send(seat.peer_id, begin) for seat in self._seats.values())]

    def _is_prepared(self, seat: _Seat) -> bool:
        prepared = seat.prepared
        return prepared is not None and prepared.step == self.committed + 1 and prepared.view == self.number

    def _commit_if_prepared(self, now_s: float) -> list[Action]:
        seats = list(self._seats.values())
        if not all(self._is_prepared(seat) for seat in seats):
            return []
        reports = [seat.prepared for seat in seats if seat.prepared is not None]
        squared_norm = sum(report.squared_norm for report in reports)
        last = self.spec.model.stages - 1
        commit = Commit(
            step=self.committed + 1,
            clip_scale=clip_scale(squared_norm, self.spec.optimizer.clip_norm),
            loss=next(seat.prepared.loss for seat in seats if seat.prepared and seat.stage == last),
            grad_norm=squared_norm**0.5,
        )
        since = self._last_commit_s if self._last_commit_s is not None else self._phase_since_s
        self._step_times_s = [*self._step_times_s[-31:], now_s - since]
        self._last_commit_s, self._stalls = now_s, 0
        # Nobody computed longer than the step took: whoever says so must not make everybody send too much.
        longest_s = (now_s - since) / self.spec.batch.microbatches
        beat_s = max((min(report.beat_s, longest_s) for report in reports if report.beat_s > 0), default=0.0)
        self.commits[commit.step], self.committed = commit, commit.step
        for seat in seats:
            seat.prepared = None
        actions: list[Action] = [Persist(commit)]
        actions += [Send(seat.peer_id, Apply(self.number, commit, beat_s)) for seat in seats]
        actions.append(Note(NoteKind.COMMITTED, step=commit.step, loss=commit.loss, commit=commit))
        if commit.step == final_slot(self.spec):
            actions += self._finish()
        return actions

    def _validated(self, step: int, loss: float) -> list[Action]:
        version = step - 1
        repeated = version in self.losses
        self.losses[version] = loss
        actions: list[Action] = []
        if not repeated:
            actions += [Send(seat.peer_id, Validated(version, loss)) for seat in self._seats.values()]
            actions.append(Note(NoteKind.VALIDATED, step=version, loss=loss))
        if version == self.spec.steps and self.phase is Phase.RUNNING:
            actions += self._finish()
        return actions

    def _finish(self) -> list[Action]:
        self.phase = Phase.FINISHED
        finished = Finished(self.spec.steps)
        return [
            *(Send(seat.peer_id, finished) for seat in self._seats.values()),
            Note(NoteKind.FINISHED, step=self.spec.steps),
        ]
