"""A whole swarm in one thread: the real coordinator and stages, with messages delivered in an order drawn from a seed.

Channels are FIFO per pair, like streams; across pairs any order is possible. A killed peer loses everything but its
journal. What each peer accumulates is counted, so a microbatch that contributes twice or not at all is seen.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from swarm.config.spec import RunSpec
from swarm.core.coordinator import Coordinator, Expel, Note, Persist, Rewind, Send
from swarm.core.frame import PROTOCOL_VERSION, FrameHeader, FrameKind, payload_bytes
from swarm.core.messages import (
    Apply,
    Begin,
    Collect,
    Collected,
    Commit,
    Evaluated,
    Finished,
    Hello,
    Install,
    Installed,
    PeerState,
    Prepared,
    Span,
    Validated,
)
from swarm.core.stage import (
    ApplyStep,
    Compute,
    Forget,
    Prepare,
    ReportEvaluation,
    StageProtocol,
    Transmit,
    Work,
)
from swarm.errors import FrameError

COORDINATOR = "coordinator"


def small_spec(**changes: object) -> RunSpec:
    fields: dict[str, object] = {
        "steps": 4,
        "model": {"d_model": 16, "layers": 3, "heads": 2, "kv_heads": 1, "context": 8, "stages": 3},
        "batch": {"sequences": 6, "microbatches": 3},
        "boundary": {"kind": "anchored", "rank": 4},
        "evaluation": {"every": 2, "sequences": 4},
    }
    return RunSpec.parse(fields | changes)


@dataclass
class Journal:
    """What survives the death of a peer's process."""

    inputs: dict[int, set[int]] = field(default_factory=dict)
    gradients: dict[int, set[int]] = field(default_factory=dict)
    commits: list[int] = field(default_factory=list)


class Peer:
    def __init__(self, swarm: LoopbackSwarm, stage: int, journal: Journal) -> None:
        self.swarm = swarm
        self.stage = stage
        self.id = f"peer-{stage}"
        self.journal = journal
        self.protocol = StageProtocol(swarm.spec, stage)
        self.tasks: list[tuple[int, int, Compute | ApplyStep | Prepare]] = []
        self.accumulated: Counter[int] = Counter()
        self.finished = False
        self._order = 0
        version = len(journal.commits)
        step, last = version + 1, swarm.spec.model.stages - 1
        inputs, gradients = journal.inputs.get(step, set()), journal.gradients.get(step, set())
        done = inputs if stage == last else gradients if stage == 0 else inputs & gradients
        if stage == last == 0:
            done = set()
        self.accumulated.update(done)
        complete = len(done) == swarm.spec.batch.microbatches
        self.protocol.restored(version, backwards=done, prepared_step=step if complete else 0)

    def state(self) -> PeerState:
        protocol = self.protocol
        return PeerState(protocol.version, protocol.prepared_step, protocol.ledger, (Span(0, protocol.version),))

    def hello(self) -> Hello:
        return Hello(self.swarm.spec.run_id, PROTOCOL_VERSION, self.stage, self.state())

    def control(self, message: object) -> None:
        protocol = self.protocol
        match message:
            case Collect(view=view):
                self.execute(protocol.collect(view))
                while self.tasks:
                    self.work()
                self.swarm.post(self.id, COORDINATOR, Collected(view, self.state()))
            case Install(view=view, commits=commits):
                for commit in commits:
                    if commit.step == protocol.step and sum(self.accumulated.values()) == self.microbatches:
                        self.apply(commit)
                        protocol.restored(commit.step)
                assert protocol.version == view.version, "no rollback is needed while journals survive"
                self.execute(protocol.install(view))
                self.swarm.post(self.id, COORDINATOR, Installed(view.number))
            case Begin():
                self.execute(protocol.begin(message))
            case Apply(commit=commit):
                self.execute(protocol.apply(commit))
            case Finished():
                self.finished = True
            case Validated(step=step, loss=loss):
                assert loss == float(step)

    @property
    def microbatches(self) -> int:
        return self.swarm.spec.batch.microbatches

    def frame(self, sender: str, header: FrameHeader) -> None:
        size = payload_bytes(header, self.swarm.spec.model.vocab_size)
        try:
            accepted = self.protocol.frame(header, sender, size)
        except FrameError:
            # A real peer tells the sender; only frames of older views may be refused here.
            assert header.view < self.swarm.coordinator.number or self.protocol.view is None
            return
        if accepted.fresh and header.kind is not FrameKind.EVALUATION:
            book = self.journal.gradients if header.kind is FrameKind.GRADIENT else self.journal.inputs
            book.setdefault(header.step, set()).add(header.microbatch)
        self.execute(accepted.actions)

    def execute(self, actions) -> None:
        for action in actions:
            match action:
                case Compute(work=work):
                    self.queue(int(work), action)
                case Prepare() | ApplyStep():
                    self.queue(-1, action)
                case Transmit():
                    self.swarm.transmit(self, action)
                case ReportEvaluation(step=step):
                    view = self.protocol.view
                    assert view is not None
                    self.swarm.post(self.id, COORDINATOR, Evaluated(view.number, step, float(step - 1)))
                case Forget():
                    pass

    def queue(self, priority: int, action) -> None:
        self._order += 1
        self.tasks.append((priority, self._order, action))
        self.tasks.sort(key=lambda task: task[:2])

    def work(self) -> None:
        _, _, action = self.tasks.pop(0)
        match action:
            case Compute(work=Work.FORWARD, step=step, microbatch=index):
                self.swarm.computed[self.stage, step, index] += 1
                self.execute(self.protocol.forward_done(step, index))
            case Compute(work=Work.BACKWARD, step=step, microbatch=index):
                self.accumulated[index] += 1
                self.execute(self.protocol.backward_done(step, index))
            case Compute(work=Work.EVALUATE, step=step, microbatch=index):
                self.execute(self.protocol.evaluation_done(step, index))
            case Prepare(step=step):
                self.protocol.prepared_step = step
                view = self.protocol.view
                assert view is not None
                self.swarm.post(self.id, COORDINATOR, Prepared(view.number, step, 1.0, 0.0))
            case ApplyStep(commit=commit):
                self.apply(commit)
                self.execute(self.protocol.applied(commit.step))

    def apply(self, commit: Commit) -> None:
        """Invariant I1: every microbatch exactly once."""
        assert self.accumulated == Counter(range(self.microbatches)), (self.id, commit.step, self.accumulated)
        self.accumulated.clear()
        self.journal.commits.append(commit.step)
        assert self.journal.commits == list(range(1, commit.step + 1))


class LoopbackSwarm:
    def __init__(self, spec: RunSpec, seed: int) -> None:
        self.spec = spec
        self.random = random.Random(seed)
        self.disk: list[Commit] = []
        self.term = 0
        self.notes: list[Note] = []
        self.expelled: list[Expel] = []
        self.computed: Counter[tuple[int, int, int]] = Counter()
        self.channels: dict[tuple[str, str], deque[object]] = {}
        self.peers: dict[str, Peer] = {}
        self.journals = {stage: Journal() for stage in range(spec.model.stages)}
        self.now = 0.0
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.term += 1
        self.coordinator = Coordinator(self.spec, commits=self.disk, term=self.term, number=self.term << 20)

    # what happens

    def join(self, stage: int) -> None:
        peer = Peer(self, stage, self.journals[stage])
        self.peers[peer.id] = peer
        self.run_actions(self.coordinator.joined(peer.id, peer.hello(), self.now))

    def kill(self, stage: int) -> None:
        peer = self.peers.pop(f"peer-{stage}")
        for pair in [pair for pair in self.channels if peer.id in pair]:
            del self.channels[pair]
        self.run_actions(self.coordinator.lost(peer.id, "killed", self.now))

    def kill_coordinator(self) -> None:
        for pair in [pair for pair in self.channels if COORDINATOR in pair]:
            del self.channels[pair]
        self.start_coordinator()
        for peer in self.peers.values():
            self.run_actions(self.coordinator.joined(peer.id, peer.hello(), self.now))

    def post(self, source: str, target: str, message: object) -> None:
        self.channels.setdefault((source, target), deque()).append(message)

    def transmit(self, peer: Peer, action: Transmit) -> None:
        view = peer.protocol.view
        assert view is not None
        header = FrameHeader(
            run_id=self.spec.run_id,
            view=view.number,
            step=action.step,
            microbatch=action.microbatch,
            kind=action.kind,
            source_stage=peer.stage,
            target_stage=action.target_stage,
            rank=self.spec.wire_rank,
            dtype=self.spec.boundary.dtype,
            batch=self.spec.batch.microbatch_sequences,
            time=self.spec.model.context,
            route=() if action.kind is FrameKind.GRADIENT else view.route,
        )
        self.post(peer.id, view.peer_of(action.target_stage), header)

    def run_actions(self, actions) -> None:
        for action in actions:
            match action:
                case Persist(commit=commit):
                    assert [c.step for c in self.disk] == list(range(1, commit.step)), "one decision per step"
                    self.disk.append(commit)
                case Rewind(version=version):
                    self.disk = [commit for commit in self.disk if commit.step <= version]
                case Send(peer_id=peer_id, message=message):
                    self.post(COORDINATOR, peer_id, message)
                case Expel():
                    self.expelled.append(action)
                case Note():
                    self.notes.append(action)

    # the clock

    def event(self) -> bool:
        """Let one thing happen; False when nothing can."""
        self.now += 0.01
        busy = [peer for peer in self.peers.values() if peer.tasks]
        ready = [pair for pair, queue in self.channels.items() if queue]
        if not busy and not ready:
            return False
        choice = self.random.randrange(len(busy) + len(ready))
        if choice < len(busy):
            busy[choice].work()
            return True
        source, target = ready[choice - len(busy)]
        message = self.channels[source, target].popleft()
        if target == COORDINATOR:
            self.run_actions(self.coordinator.received(source, message, self.now))  # type: ignore[arg-type]
        elif target in self.peers:
            peer = self.peers[target]
            if isinstance(message, FrameHeader):
                peer.frame(source, message)
            else:
                peer.control(message)
        return True

    def run(self, limit: int = 20_000) -> None:
        """Until nothing can happen any more."""
        for _ in range(limit):
            if not self.event():
                return
        raise AssertionError("the swarm does not come to rest")
