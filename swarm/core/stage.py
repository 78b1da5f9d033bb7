"""What one peer does with frames and decisions: the step protocol from a stage's side. No I/O, no tensors.

Payloads stay with the shell, under the key (kind, step, microbatch); this machine says what to compute, what to send
and what to refuse. Every operation on a microbatch may be repeated: a frame that was handled before makes the stage
repeat what it sent, so a head that drives a microbatch again repairs whatever is missing along its route, and only
that is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from swarm.config.spec import RunSpec
from swarm.core.frame import FrameGuard, FrameHeader, FrameKind
from swarm.core.ledger import Ledger
from swarm.core.messages import Begin, Commit
from swarm.core.schedule import evaluation_microbatches, training_microbatches
from swarm.core.view import View
from swarm.errors import FrameError


class Work(IntEnum):
    """What the compute thread is asked for; a lower value goes first."""

    BACKWARD = 0
    FORWARD = 1
    EVALUATE = 2


@dataclass(frozen=True, slots=True)
class Compute:
    """Run ``work`` on a microbatch whose inputs the shell holds, then call the matching ``*_done``."""

    work: Work
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send what was computed for a microbatch to a neighbour; ``repeat`` when it was sent before."""

    kind: FrameKind
    step: int
    microbatch: int
    target_stage: int
    repeat: bool = False


@dataclass(frozen=True, slots=True)
class Prepare:
    """Everything of ``step`` is accumulated: make it durable and report ``Prepared``."""

    step: int


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Run the optimizer for a committed step, then call :meth:`StageProtocol.applied`."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """All validation microbatches of slot ``step`` have a loss: report their mean."""

    step: int


@dataclass(frozen=True, slots=True)
class Forget:
    """No message of ``step`` or before will be asked for again."""

    step: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a frame leads to."""

    fresh: bool
    """The payload is needed: the shell keeps it. Else it is a repeat, and the payload can go."""
    actions: tuple[Action, ...] = ()


Action = Compute | Transmit | Prepare | ApplyStep | ReportEvaluation | Forget


class Progress(IntEnum):
    """How far one direction of a microbatch is on this stage."""

    NONE = 0
    QUEUED = 1
    DONE = 2


@dataclass(slots=True)
class _Microbatch:
    forward: Progress = Progress.NONE
    backward: Progress = Progress.NONE


@dataclass(slots=True)
class _Slot:
    """State of the current slot."""

    step: int
    training: dict[int, _Microbatch] = field(default_factory=dict[int, _Microbatch])
    evaluations: dict[int, Progress] = field(default_factory=dict[int, Progress])
    prepared_view: int = 0
    reported_view: int = 0


class StageProtocol:
    """The step protocol of one stage.

    Args:
        spec: the run.
        stage: the stage that this peer hosts.
        version: optimizer steps that its parameters have behind them.
        in_flight_limit: microbatches that the head keeps between its forward and its backward.
    """

    def __init__(self, spec: RunSpec, stage: int, *, version: int = 0, in_flight_limit: int | None = None) -> None:
        self.spec = spec
        self.stage = stage
        self.last = spec.model.stages - 1
        self.in_flight_limit = in_flight_limit or spec.model.stages + 1
        self.view: View | None = None
        self.fence = 0
        """Frames of views below this number are refused."""
        self.prepared_step = 0
        self._guard = FrameGuard(spec, spec.run_id, stage)
        self._slot = _Slot(version + 1)
        self._begun = False
        self._applying = False
        self._early: list[FrameHeader] = []
        self._to_drive: deque[tuple[FrameKind, int]] = deque()
        self._driven: set[int] = set()

    # state

    @property
    def version(self) -> int:
        return self._slot.step - 1

    @property
    def step(self) -> int:
        """The slot being worked on."""
        return self._slot.step

    @property
    def ledger(self) -> Ledger:
        slot = self._slot
        return Ledger(
            step=slot.step,
            backwards=tuple(sorted(i for i, m in slot.training.items() if m.backward is Progress.DONE)),
            evaluations=tuple(sorted(i for i, p in slot.evaluations.items() if p is Progress.DONE)),
        )

    # views

    def collect(self, view: int) -> list[Action]:
        """A new view is being formed: refuse frames of older ones from now on."""
        self.fence = max(self.fence, view)
        self._begun = False
        self._to_drive.clear()
        self._driven.clear()
        self._early.clear()
        return []

    def restored(self, version: int, *, backwards: Iterable[int] = (), prepared_step: int = 0) -> list[Action]:
        """The shell has put the parameters to ``version``, with the gradients of ``backwards`` accumulated on top."""
        self._slot = _Slot(version + 1)
        for index in backwards:
            self._slot.training[index] = _Microbatch(Progress.DONE, Progress.DONE)
        self.prepared_step = prepared_step
        self._applying = False
        return []

    def install(self, view: View) -> list[Action]:
        """Adopt a view whose version this stage holds."""
        if view.version != self.version:
            raise AssertionError(
                f"view {view.number} begins at version {view.version}, this stage is at {self.version}"
            )
        self.view = view
        self.fence = max(self.fence, view.number)
        return []

    def begin(self, message: Begin) -> list[Action]:
        """Everybody has installed the view."""
        if self.view is None or message.view != self.view.number or message.step != self._slot.step:
            return []
        self._begun = True
        actions: list[Action] = []
        if self.stage == 0:
            self._to_drive.extend((FrameKind.EVALUATION, index) for index in message.evaluations)
            self._to_drive.extend((FrameKind.ACTIVATION, index) for index in message.training)
            actions += self._drive()
        return [*actions, *self._complete(), *self._drain_early()]

    # frames

    def check(self, header: FrameHeader, sender: str, payload_size: int) -> None:
        """Refuse a frame that this stage cannot use; nothing changes.

        Raises:
            FrameError: names what does not fit.
        """
        view = self.view
        if view is None:
            raise FrameError("Refused a frame: this peer has no view yet.", meaning="It is repeated after the view.")
        if header.view > view.number:
            raise FrameError(
                f"Refused a frame: its view {header.view} is above {view.number}, which is installed here."
            )
        sender_stage = view.stage_of(sender)
        if sender_stage is None:
            raise FrameError(
                f"Refused a frame: peer {sender} is not in view {view.number}.",
                meaning="Nothing of it was used.",
                remedy="A peer that was replaced has to join again.",
            )
        self._guard.check(header, view=self.fence, sender_stage=sender_stage, payload_size=payload_size)
        if header.route and header.route != view.route:
            raise FrameError(f"Refused a frame: its route {header.route} is not that of view {view.number}.")
        if header.step > self._slot.step + 1:
            raise FrameError(f"Refused a frame: its step {header.step} is beyond {self._slot.step}, this stage's step.")

    def frame(self, header: FrameHeader, sender: str, payload_size: int) -> Accepted:
        """A frame arrived.

        Raises:
            FrameError: as in :meth:`check`.
        """
        self.check(header, sender, payload_size)
        if header.step < self._slot.step:
            return Accepted(fresh=False)
        if header.step > self._slot.step or not self._begun:
            # The neighbour has applied the commit (or heard Begin) before this stage has.
            if any(self._key(header) == self._key(other) for other in self._early):
                return Accepted(fresh=False)
            self._early.append(header)
            return Accepted(fresh=True)
        actions = tuple(self._accept(header))
        needed = Compute(self._work_of(header.kind), header.step, header.microbatch)
        return Accepted(fresh=needed in actions, actions=actions)

    @staticmethod
    def _work_of(kind: FrameKind) -> Work:
        match kind:
            case FrameKind.ACTIVATION:
                return Work.FORWARD
            case FrameKind.GRADIENT:
                return Work.BACKWARD
            case FrameKind.EVALUATION:
                return Work.EVALUATE

    @staticmethod
    def _key(header: FrameHeader) -> tuple[FrameKind, int, int]:
        return header.kind, header.step, header.microbatch

    def _accept(self, header: FrameHeader) -> list[Action]:
        index = header.microbatch
        match header.kind:
            case FrameKind.ACTIVATION:
                return self._accept_activation(index)
            case FrameKind.GRADIENT:
                return self._accept_gradient(index)
            case FrameKind.EVALUATION:
                progress = self._slot.evaluations.get(index, Progress.NONE)
                if progress is Progress.NONE:
                    self._slot.evaluations[index] = Progress.QUEUED
                    return [Compute(Work.EVALUATE, self.step, index)]
                if progress is Progress.DONE and self.stage < self.last:
                    return [Transmit(FrameKind.EVALUATION, self.step, index, self.stage + 1, repeat=True)]
                return []

    def _accept_activation(self, index: int) -> list[Action]:
        microbatch = self._slot.training.setdefault(index, _Microbatch())
        if microbatch.forward is Progress.NONE:
            microbatch.forward = Progress.QUEUED
            return [Compute(Work.FORWARD, self.step, index)]
        if microbatch.forward is Progress.QUEUED:
            return []
        if self.stage < self.last:
            return [Transmit(FrameKind.ACTIVATION, self.step, index, self.stage + 1, repeat=True)]
        if microbatch.backward is Progress.DONE and self.stage > 0:
            return [Transmit(FrameKind.GRADIENT, self.step, index, self.stage - 1, repeat=True)]
        return []

    def _accept_gradient(self, index: int) -> list[Action]:
        microbatch = self._slot.training.get(index)
        if microbatch is None or microbatch.forward is not Progress.DONE:
            # A repeat that overtook the activation; the head's drive brings both again in order.
            return []
        if microbatch.backward is Progress.NONE:
            microbatch.backward = Progress.QUEUED
            return [Compute(Work.BACKWARD, self.step, index)]
        if microbatch.backward is Progress.QUEUED:
            return []
        if self.stage > 0:
            return [Transmit(FrameKind.GRADIENT, self.step, index, self.stage - 1, repeat=True)]
        self._driven.discard(index)
        return self._drive()

    # results of the compute thread

    def forward_done(self, step: int, index: int) -> list[Action]:
        """The forward pass of a training microbatch is computed."""
        if step != self.step:
            return []
        microbatch = self._slot.training[index]
        microbatch.forward = Progress.DONE
        if self.stage == self.last:
            microbatch.backward = Progress.QUEUED
            return [Compute(Work.BACKWARD, step, index)]
        return [Transmit(FrameKind.ACTIVATION, step, index, self.stage + 1)] if self._begun else []

    def backward_done(self, step: int, index: int) -> list[Action]:
        """The gradient of a training microbatch is accumulated."""
        if step != self.step:
            return []
        self._slot.training[index].backward = Progress.DONE
        actions: list[Action] = []
        if self.stage > 0 and self._begun:
            actions.append(Transmit(FrameKind.GRADIENT, step, index, self.stage - 1))
        if self.stage == 0:
            self._driven.discard(index)
            actions += self._drive()
        return [*actions, *self._complete()]

    def evaluation_done(self, step: int, index: int) -> list[Action]:
        """A validation microbatch has passed this stage."""
        if step != self.step:
            return []
        self._slot.evaluations[index] = Progress.DONE
        actions: list[Action] = []
        if self.stage < self.last and self._begun:
            actions.append(Transmit(FrameKind.EVALUATION, step, index, self.stage + 1))
        return [*actions, *self._complete()]

    # commits

    def apply(self, commit: Commit) -> list[Action]:
        """The coordinator has committed the current step."""
        if commit.step != self.step or self._applying:
            return []
        self._applying = True
        return [ApplyStep(commit)]

    def applied(self, step: int) -> list[Action]:
        """The optimizer has run: the next slot begins."""
        if step != self.step:
            return []
        self._slot = _Slot(step + 1)
        self._applying = False
        actions: list[Action] = [Forget(step)]
        if self._begun and self.stage == 0:
            self._driven.clear()
            evaluations = evaluation_microbatches(self.spec, self.step)
            self._to_drive.extend((FrameKind.EVALUATION, index) for index in range(evaluations))
            training = training_microbatches(self.spec, self.step)
            self._to_drive.extend((FrameKind.ACTIVATION, index) for index in range(training))
            actions += self._drive()
        return [*actions, *self._drain_early()]

    # the head

    def _drive(self) -> list[Action]:
        actions: list[Action] = []
        while self._to_drive and self._begun:
            kind, index = self._to_drive[0]
            if kind is FrameKind.ACTIVATION:
                if len(self._driven) >= self.in_flight_limit:
                    break
                self._driven.add(index)
            self._to_drive.popleft()
            actions += self._drive_evaluation(index) if kind is FrameKind.EVALUATION else self._drive_training(index)
        return actions

    def _drive_evaluation(self, index: int) -> list[Action]:
        progress = self._slot.evaluations.get(index, Progress.NONE)
        if progress is Progress.NONE:
            self._slot.evaluations[index] = Progress.QUEUED
            return [Compute(Work.EVALUATE, self.step, index)]
        if progress is Progress.DONE and self.last > 0:
            return [Transmit(FrameKind.EVALUATION, self.step, index, 1, repeat=True)]
        return []

    def _drive_training(self, index: int) -> list[Action]:
        microbatch = self._slot.training.setdefault(index, _Microbatch())
        if microbatch.forward is Progress.NONE:
            microbatch.forward = Progress.QUEUED
            return [Compute(Work.FORWARD, self.step, index)]
        if microbatch.forward is Progress.DONE and self.last > 0:
            return [Transmit(FrameKind.ACTIVATION, self.step, index, 1, repeat=True)]
        return []

    # the end of a slot

    def _complete(self) -> list[Action]:
        slot, view = self._slot, self.view
        if view is None or not self._begun:
            return []
        evaluations = evaluation_microbatches(self.spec, slot.step)
        if sum(progress is Progress.DONE for progress in slot.evaluations.values()) < evaluations:
            return []
        actions: list[Action] = []
        if evaluations and self.stage == self.last and slot.reported_view < view.number:
            slot.reported_view = view.number
            actions.append(ReportEvaluation(slot.step))
        training = training_microbatches(self.spec, slot.step)
        done = sum(microbatch.backward is Progress.DONE for microbatch in slot.training.values())
        if training and done == training and slot.prepared_view < view.number and not self._applying:
            slot.prepared_view = view.number
            actions.append(Prepare(slot.step))
        return actions

    def _drain_early(self) -> list[Action]:
        ready = [header for header in self._early if header.step == self.step] if self._begun else []
        self._early = [header for header in self._early if header.step > self.step]
        return [action for header in ready for action in self._accept(header)]
