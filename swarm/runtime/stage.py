"""One stage at work: turns the actions of :class:`swarm.core.stage.StageProtocol` into compute, frames and disk writes.

Lives in the loop; tensors are only touched in the compute thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from swarm.config.spec import Rung, RunSpec
from swarm.core.frame import FrameHeader, FrameKind
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
    Install,
    Installed,
    Installing,
    PeerMessage,
    PeerState,
    Prepared,
    Validated,
    Waiting,
)
from swarm.core.schedule import in_flight_limit
from swarm.core.stage import (
    Action,
    ApplyStep,
    Compute,
    Forget,
    Prepare,
    ReportEvaluation,
    StageProtocol,
    Transmit,
    Work,
)
from swarm.data import Sampler
from swarm.errors import CheckpointError
from swarm.model.codec import check_finite
from swarm.model.trainer import Inbound, Outbound, StageTrainer
from swarm.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EventLog,
    FrameRefused,
    Restored,
    Validation,
    ViewInstalled,
)
from swarm.observe.events import Waiting as WaitingEvent
from swarm.runtime.compute import HOUSEKEEPING, ComputeThread
from swarm.runtime.neighbours import Neighbours
from swarm.runtime.pace import Pace
from swarm.runtime.rates import Rates
from swarm.runtime.recovery import SavedCheckpoint, StageDisk

INSTALLING_EVERY_S = 1.0
"""How often a peer that restores or connects says that it is still at it."""

URGENT = -1
"""Priority of what the whole swarm waits for at the end of a step."""

Key = tuple[FrameKind, int, int]


class StageRunner:
    """Hosts one stage of a run.

    Args:
        report: sends a message to the coordinator, or drops it while there is none.
        sampler: draws microbatches; only stage 0 has one.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        *,
        trainer: StageTrainer,
        compute: ComputeThread,
        disk: StageDisk,
        sampler: Sampler | None,
        report: Callable[[PeerMessage], None],
        log: EventLog,
    ) -> None:
        self.spec = spec
        self.stage = stage
        self.run_id = spec.run_id
        self.trainer = trainer
        self.compute = compute
        self.disk = disk
        self.sampler = sampler
        self.protocol = StageProtocol(spec, stage)
        self.finished = asyncio.Event()
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that this peer cannot go on after."""
        self.neighbours: Neighbours | None = None
        self.train_loss = 0.0
        self.val_loss = 0.0
        self._report = report
        self._log = log
        self._inbox: dict[Key, Inbound] = {}
        self._outbox: dict[Key, Outbound] = {}
        self._evaluation_losses: dict[int, float] = {}
        self._sent: set[Key] = set()
        self._compute_s = 0.0  # spent on training microbatches of this step; the compute thread's
        self._generation = 0
        self._installing: asyncio.Task[None] | None = None
        self._pace = Pace(spec)
        self.rates = Rates(spec, stage)
        self._tasks: set[asyncio.Task[Any]] = set()

    # lifecycle

    async def recover(self) -> None:
        """Load what the disk has; to be called before the first session."""
        await self._restore(None)

    async def close(self) -> None:
        """Stop, keep a checkpoint of the last applied step, release the disk."""
        self._generation += 1
        if self._installing is not None:
            self._installing.cancel()
            await asyncio.gather(self._installing, return_exceptions=True)
        if self.neighbours is not None:
            await self.neighbours.close()
        if not self.fault.done():
            if self.trainer.version not in self.disk.store.steps() and self.trainer.version > 0:
                saved = await self.compute.submit(HOUSEKEEPING, self.disk.save, self.trainer)
                if saved is not None:
                    await self._saved(asyncio.wrap_future(saved))
            self.fault.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.disk.close)

    def state(self) -> PeerState:
        """What this peer tells the coordinator it holds."""
        protocol = self.protocol
        return PeerState(
            version=protocol.version,
            prepared_step=protocol.prepared_step,
            ledger=protocol.ledger,
            restorable=self.disk.restorable(protocol.version),
        )

    @property
    def in_flight_bytes(self) -> int:
        """Messages kept for repeats and graphs kept for backward passes."""
        boxes = (*self._inbox.values(), *self._outbox.values())
        return sum(len(entry.payload) for entry in boxes) + self.trainer.in_flight_bytes

    # from the coordinator

    async def handle(self, message: CoordinatorMessage) -> None:
        """Act on a message of the coordinator."""
        match message:
            case Waiting(missing_stages=missing, reason=reason):
                await self._stop_installing()
                self._log.emit(WaitingEvent(missing_stages=missing, reason=reason))
            case Collect(view=view):
                await self._stop_installing()
                self._execute(self.protocol.collect(view))
                await self.compute.drain()
                await asyncio.sleep(0)
                self._report(Collected(view, self.state()))
            case Install():
                self._installing = asyncio.create_task(self._install(message), name="install-view")
            case Begin():
                self._execute(self.protocol.begin(message))
            case Apply(commit=commit):
                self._execute(self.protocol.apply(commit))
            case Validated(step=step, loss=loss):
                self.val_loss = loss
                self._log.emit(Validation(step=step, loss=loss))
            case Finished():
                await self.compute.drain()
                await asyncio.sleep(0)
                self.finished.set()

    async def _stop_installing(self) -> None:
        task, self._installing = self._installing, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _install(self, message: Install) -> None:
        view = message.view
        beats = asyncio.create_task(self._say_installing(view.number))
        try:
            await self._reach(message)
            self._execute(self.protocol.install(view))
            self._sent.clear()
            if self.neighbours is not None:
                await self.neighbours.connect(view)
            members = {member.stage: member.peer_id for member in view.members}
            self._log.emit(ViewInstalled(view=view.number, step=view.first_step, members=members))
            self._report(Installed(view.number))
        except CheckpointError as error:
            await self._restore(None)
            self._report(CannotInstall(view.number, error.what))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)
        finally:
            beats.cancel()

    async def _reach(self, message: Install) -> None:
        """Bring the parameters to the version of the view."""
        version = message.view.version
        commits = {commit.step: commit for commit in message.commits}
        while self.protocol.version < version and self.protocol.step in commits:
            if len(self.protocol.ledger.backwards) < self.spec.batch.microbatches:
                break
            await asyncio.shield(self._apply_missed(commits[self.protocol.step]))
        if self.protocol.version != version:
            await asyncio.shield(self._restore(version))

    async def _apply_missed(self, commit: Commit) -> None:
        self.disk.commit(commit)
        await self.compute.submit(URGENT, self.trainer.apply, commit.clip_scale)
        self.protocol.restored(commit.step)
        self._forget(commit.step)

    async def _say_installing(self, view: int) -> None:
        while True:
            await asyncio.sleep(INSTALLING_EVERY_S)
            self._report(Installing(view, "restoring or connecting"))

    async def _restore(self, version: int | None) -> None:
        self._generation += 1
        await self.compute.drain()
        restored = await self.compute.submit(
            URGENT, lambda: self.disk.restore(self.trainer, self.sampler, at_most=version)
        )
        complete = len(restored.backwards) == self.spec.batch.microbatches
        self.protocol.restored(
            restored.version,
            backwards=restored.backwards,
            prepared_step=restored.version + 1 if complete else 0,
        )
        self._inbox.clear()
        self._evaluation_losses.clear()
        self._outbox = dict(restored.outbound)
        if restored.version:
            source = f"checkpoint of step {restored.checkpoint}" if restored.checkpoint else "the initial weights"
            self._log.emit(Restored(step=restored.version, source=source, replayed_steps=restored.replayed))

    # frames

    def check_frame(self, sender: str, header: FrameHeader, size: int) -> None:
        """Refuse a frame before memory is taken for it.

        Raises:
            FrameError: says why.
        """
        self.protocol.check(header, sender, size)

    def on_frame(self, sender: str, header: FrameHeader, payload: memoryview) -> None:
        """A complete frame of a neighbour.

        Raises:
            FrameError: refused; nothing changed.
        """
        check_finite(payload, header)
        accepted = self.protocol.frame(header, sender, len(payload))
        try:
            if accepted.fresh:
                self._inbox[header.kind, header.step, header.microbatch] = Inbound(payload, header.rank, header.dtype)
                if header.kind is not FrameKind.EVALUATION:
                    self.disk.append(header, payload)
            self._execute(accepted.actions)
        except Exception as error:  # the frame counts as received, so that a repeat of it would change nothing
            self._fail(error)
            raise

    def on_refused(self, peer_id: str, reason: str) -> None:
        """A neighbour refused a frame of this peer."""
        self._log.emit(FrameRefused(sender="this peer", reason=f"{peer_id} said: {reason}"))

    def on_link_lost(self, peer_id: str, reason: str) -> None:
        """A link to a neighbour failed."""
        view = self.protocol.view
        if view is not None:
            self._report(Disturbed(view.number, peer_id, reason))

    # actions

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Compute(work=work, step=step, microbatch=index):
                    self._compute(work, step, index)
                case Transmit():
                    self._transmit(action)
                case Prepare(step=step):
                    self._spawn(self._prepare(step))
                case ApplyStep(commit=commit):
                    self._spawn(self._apply(commit))
                case ReportEvaluation(step=step):
                    losses = self._evaluation_losses.values()
                    view = self.protocol.view
                    if view is not None and losses:
                        self._report(Evaluated(view.number, step, sum(losses) / len(losses)))
                case Forget(step=step):
                    self._forget(step)

    def _compute(self, work: Work, step: int, index: int) -> None:
        generation = self._generation
        future: asyncio.Future[Any]
        match work:
            case Work.FORWARD:
                future = self.compute.submit(work, self._forward, step, index, self.rates.activation_rung())
            case Work.BACKWARD:
                future = self.compute.submit(work, self._backward, step, index)
            case Work.EVALUATE:
                future = self.compute.submit(work, self._evaluate, step, index, self.rates.activation_rung())

        def done(future: asyncio.Future[Outbound | float | None]) -> None:
            if generation != self._generation or future.cancelled():
                return
            try:
                self._computed(work, step, index, future.result())
            except BaseException as error:  # the loop would only log it, and the step never end
                self._fail(error)

        future.add_done_callback(done)

    def _computed(self, work: Work, step: int, index: int, result: Outbound | float | None) -> None:
        if work is Work.EVALUATE and isinstance(result, float):
            self._evaluation_losses[index] = result
        elif isinstance(result, Outbound):
            kinds = {
                Work.FORWARD: FrameKind.ACTIVATION,
                Work.BACKWARD: FrameKind.GRADIENT,
                Work.EVALUATE: FrameKind.EVALUATION,
            }
            self._outbox[kinds[work], step, index] = result
        match work:
            case Work.FORWARD:
                self._execute(self.protocol.forward_done(step, index))
            case Work.BACKWARD:
                self._execute(self.protocol.backward_done(step, index))
            case Work.EVALUATE:
                self._execute(self.protocol.evaluation_done(step, index))

    # in the compute thread

    def _forward(self, step: int, index: int, rung: Rung) -> Outbound | None:
        began = time.perf_counter()
        outbound = self.trainer.forward(
            step,
            index,
            tokens=self._tokens(step, index, evaluation=False),
            inbound=self._inbox.get((FrameKind.ACTIVATION, step, index)),
            rank=rung.rank,
            dtype=rung.dtype,
        )
        self._compute_s += time.perf_counter() - began
        return outbound

    def _backward(self, step: int, index: int) -> Outbound | None:
        began = time.perf_counter()
        # A gradient answers in the rank and dtype of the activations that came.
        inbound = self._inbox.get((FrameKind.ACTIVATION, step, index))
        rung = Rung(inbound.rank, inbound.dtype) if inbound else self.spec.rungs[0]
        outbound = self.trainer.backward(
            step,
            index,
            gradient=self._inbox.get((FrameKind.GRADIENT, step, index)),
            rank=rung.rank,
            dtype=rung.dtype,
        )
        self._compute_s += time.perf_counter() - began
        return outbound

    def _evaluate(self, step: int, index: int, rung: Rung) -> Outbound | float:
        return self.trainer.evaluate(
            index,
            tokens=self._tokens(step, index, evaluation=True),
            inbound=self._inbox.get((FrameKind.EVALUATION, step, index)),
            rank=rung.rank,
            dtype=rung.dtype,
        )

    def _tokens(self, step: int, index: int, *, evaluation: bool) -> np.ndarray | None:
        if self.sampler is None:
            return None
        return self.sampler.validation(index) if evaluation else self.sampler.microbatch(step, index)

    def _totals(self, step: int) -> tuple[float, float, float]:
        """Squared norm of the gradient, mean loss (last stage), and mean seconds of compute a microbatch."""
        loss = 0.0
        if self.stage == self.protocol.last:
            count = self.spec.batch.microbatches
            loss = sum(self.trainer.loss(step, index) for index in range(count)) / count
        beat_s, self._compute_s = self._compute_s / self.spec.batch.microbatches, 0.0
        return self.trainer.squared_norm(), loss, beat_s

    # the end of a step

    async def _prepare(self, step: int) -> None:
        view = self.protocol.view
        if view is None:
            return
        flushed = asyncio.wrap_future(self.disk.flush())
        squared_norm, loss, beat_s = await self.compute.submit(URGENT, self._totals, step)
        await flushed
        if step == self.protocol.step:
            self.protocol.prepared_step = step
            self._report(Prepared(view.number, step, squared_norm, loss, beat_s))

    async def _apply(self, commit: Commit) -> None:
        generation = self._generation
        self.disk.commit(commit)
        await self.compute.submit(URGENT, self.trainer.apply, commit.clip_scale)
        if generation != self._generation:
            return
        self._evaluation_losses.clear()
        self._execute(self.protocol.applied(commit.step))
        self.train_loss = commit.loss
        self._log.emit(self._pace.committed(commit))
        self.protocol.in_flight_limit = in_flight_limit(
            self.spec.model.stages,
            self.spec.batch.microbatches,
            self.neighbours.rtt_s if self.neighbours is not None else 0.0,
            self._pace.beat_s,
        )
        if commit.step % self.spec.checkpoint.every == 0 or self.disk.wants_checkpoint:
            # Parameters only change between steps, so the snapshot may wait behind the microbatches.
            saving = await self.compute.submit(HOUSEKEEPING, self.disk.save, self.trainer)
            if saving is not None:
                await self._saved(asyncio.wrap_future(saving))

    async def _saved(self, saving: asyncio.Future[SavedCheckpoint]) -> None:
        try:
            saved = await saving
        except CheckpointError as error:
            self._log.emit(CheckpointFailed(step=self.trainer.version, error=str(error)))
        else:
            self._log.emit(CheckpointSaved(step=saved.step, bytes=saved.bytes, seconds=saved.seconds))

    # sending

    def _transmit(self, action: Transmit) -> None:
        view = self.protocol.view
        key = (action.kind, action.step, action.microbatch)
        outbound = self._outbox.get(key)
        if view is None or self.neighbours is None or outbound is None:
            return
        header = FrameHeader(
            run_id=self.run_id,
            view=view.number,
            step=action.step,
            microbatch=action.microbatch,
            kind=action.kind,
            source_stage=self.stage,
            target_stage=action.target_stage,
            rank=outbound.rank,
            dtype=outbound.dtype,
            batch=self.spec.batch.microbatch_sequences,
            time=self.spec.model.context,
            route=() if action.kind is FrameKind.GRADIENT else view.route,
            attempt=int(action.repeat),
            limit=self.rates.gradient_limit() if action.kind is FrameKind.GRADIENT else 0,
        )
        self.neighbours.send(action.target_stage, header, outbound.payload)

    def _forget(self, step: int) -> None:
        for box in (self._inbox, self._outbox):
            for key in [key for key in box if key[1] <= step]:
                del box[key]

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.fault.done():
            self.fault.set_exception(error)
