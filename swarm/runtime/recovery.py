"""What a stage has on disk, and how a peer gets back to where it was.

A checkpoint holds the parameters and moments of one version; the journal holds every frame that was used and every
commit since then. Replaying the journal on the checkpoint repeats the same operations in the same order, so a peer
that was killed comes back with the state it had, the unfinished step included, and nobody else repeats anything.

Everything here is synchronous and runs in the compute thread, except :meth:`StageDisk.append`, which only queues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
from torch import Tensor

from swarm.config.spec import Rung, RunSpec, WireDtype
from swarm.core.frame import FrameHeader, FrameKind
from swarm.core.messages import Commit, Span
from swarm.core.schedule import training_microbatches
from swarm.data import Sampler
from swarm.errors import CheckpointError
from swarm.model.trainer import Inbound, Outbound, StageTrainer
from swarm.state import CheckpointStore, Journal, Record, RecordKind

JOURNAL_LIMIT_BYTES = 2 * 2**30
"""A journal above this size asks for a checkpoint before the next one is due."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is on disk."""

    step: int
    bytes: int
    seconds: float


@dataclass(slots=True)
class Restored:
    """Where a stage is after :meth:`StageDisk.restore`."""

    version: int
    backwards: tuple[int, ...] = ()
    """Microbatches of the next step whose gradient is accumulated."""
    outbound: dict[tuple[FrameKind, int, int], Outbound] = field(
        default_factory=dict[tuple[FrameKind, int, int], Outbound]
    )
    """What the stage had sent of the next step, to repeat when asked."""
    checkpoint: int = 0
    replayed: int = 0


class StageDisk:
    """Checkpoints and journal of one stage, written by one background thread in the order of the calls.

    Args:
        folder: private to this peer.
        report: told about every checkpoint that could not be read.
    """

    def __init__(self, spec: RunSpec, stage: int, folder: Path, report: Callable[[CheckpointError], None]) -> None:
        self.spec = spec
        self.stage = stage
        self._report = report
        self.store = CheckpointStore(folder / "checkpoints", run_id=spec.run_id, stage=stage, keep=spec.checkpoint.keep)
        self.journal = Journal(folder / "journal", run_id=spec.run_id, stage=stage)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="swarm-disk")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="swarm-checkpoint")
        self._saving: Future[SavedCheckpoint] | None = None
        self._failure: Future[None] | None = None

    # writing

    def append(self, header: FrameHeader, payload: memoryview) -> None:
        """Queue a received frame for the journal. The payload must stay unchanged."""
        kind = RecordKind.GRADIENT if header.kind is FrameKind.GRADIENT else RecordKind.INPUT
        packed = msgpack.packb((header.rank, header.dtype.value))
        self._queue(self.journal.append, kind, header.step, header.microbatch, packed, payload)

    def commit(self, commit: Commit) -> None:
        """Queue a commit for the journal."""
        packed = msgpack.packb((commit.clip_scale, commit.loss, commit.grad_norm))
        self._queue(self.journal.append, RecordKind.COMMIT, commit.step, 0, packed, b"")

    def flush(self) -> Future[None]:
        """Resolves when everything queued so far is in the hands of the operating system."""
        return self._writer.submit(self._raise_failure)

    def save(self, trainer: StageTrainer) -> Future[SavedCheckpoint] | None:
        """Write a checkpoint of the trainer's version in the background; None while one is being written."""
        if self._saving is not None and not self._saving.done():
            return None
        version = trainer.version
        tensors = trainer.state()
        self._queue(self.journal.rotate, version)
        self._saving = self._saver.submit(self._save, version, tensors)
        return self._saving

    @property
    def wants_checkpoint(self) -> bool:
        return self.journal.bytes > JOURNAL_LIMIT_BYTES

    def close(self) -> None:
        """Finish what is queued and release the folder."""
        self._saver.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        self.journal.close()

    def _queue(self, function: Callable[..., object], *args: object) -> None:
        def task() -> None:
            function(*args)

        future = self._writer.submit(task)
        future.add_done_callback(self._note_failure)

    def _note_failure(self, future: Future[None]) -> None:
        if future.exception() is not None and self._failure is None:
            self._failure = future

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            failure.result()

    def _save(self, version: int, tensors: dict[str, Tensor]) -> SavedCheckpoint:
        began = time.monotonic()
        path = self.store.save(version, tensors, {})
        steps = self.store.steps()
        if len(steps) > 1:
            # Should the newest be broken, the one before and the journal since then lead here; before the first
            # checkpoint that is the seed.
            self._queue(self.journal.trim, steps[0])
        return SavedCheckpoint(version, path.stat().st_size, time.monotonic() - began)

    # reading

    def restorable(self, version: int) -> tuple[Span, ...]:
        """Versions that this disk leads back to, for a stage that is at ``version``."""
        return (Span(min((step for step in self.store.steps() if step <= version), default=0), version),)

    def restore(self, trainer: StageTrainer, sampler: Sampler | None, *, at_most: int | None = None) -> Restored:
        """Put ``trainer`` to the newest version on disk, or to ``at_most`` and forget what comes after it.

        Raises:
            CheckpointError: ``at_most`` is given and cannot be reached.
        """
        self.flush().result()
        if at_most is not None:
            # A save that is still under way would bring the given-up future back.
            if self._saving is not None:
                wait([self._saving])
            self.store.discard_after(at_most)
            self.journal.discard_after(at_most)
        checkpoint = self.store.newest(self._report, at_most)
        trainer.load_state(checkpoint.tensors if checkpoint else trainer.initial_state())
        restored = Restored(trainer.version, checkpoint=trainer.version)
        replay = _Replay(self.spec, self.stage, trainer, sampler)
        replay.run(self.journal.replay(trainer.version))
        restored.replayed = trainer.version - restored.version
        restored.version = trainer.version
        restored.backwards = tuple(sorted(replay.backwards))
        restored.outbound = replay.outbound
        if at_most is not None and trainer.version != at_most:
            raise CheckpointError(
                f"Stage {self.stage} was to go back to step {at_most} and only reached {trainer.version}.",
                meaning="The run goes back to an older step that all stages have.",
                remedy="Nothing to do; look for the broken checkpoint reported above.",
            )
        return restored


class _Replay:
    """Repeats the operations of a journal on a trainer."""

    def __init__(self, spec: RunSpec, stage: int, trainer: StageTrainer, sampler: Sampler | None) -> None:
        self.spec = spec
        self.stage = stage
        self.last = spec.model.stages - 1
        self.trainer = trainer
        self.sampler = sampler
        self.inputs: dict[int, Inbound] = {}
        self.backwards: set[int] = set()
        self.outbound: dict[tuple[FrameKind, int, int], Outbound] = {}
        self._early: list[Record] = []

    def run(self, records: Iterable[Record]) -> None:
        for record in records:
            step = self.trainer.version + 1
            if record.step != step:
                if record.step > step and record.kind is RecordKind.COMMIT:
                    # A commit is missing in between: what follows belongs to versions that cannot be reached.
                    return
                self._early.append(record)
                continue
            self._step_record(record)
        self._take_early()

    def _take_early(self) -> None:
        early, self._early = self._early, []
        for record in early:
            if record.step == self.trainer.version + 1:
                self._step_record(record)

    def _step_record(self, record: Record) -> None:
        index = record.microbatch
        if record.kind is not RecordKind.COMMIT and index in self.backwards:
            return
        match record.kind:
            case RecordKind.INPUT:
                self.inputs[index] = _inbound(record)
                if self.stage == self.last:
                    self._forward(index)
                    self._backward(index, None)
            case RecordKind.GRADIENT:
                gradient = _inbound(record)
                if self.stage == 0 or index in self.inputs:
                    self._forward(index, Rung(gradient.rank, gradient.dtype))
                    self._backward(index, gradient)
            case RecordKind.COMMIT:
                if self.stage == self.last == 0:
                    for alone in range(training_microbatches(self.spec, record.step)):
                        self._forward(alone)
                        self._backward(alone, None)
                if len(self.backwards) == training_microbatches(self.spec, record.step):
                    clip_scale, _, _ = msgpack.unpackb(record.header)
                    self.trainer.apply(clip_scale)
                    self.inputs.clear()
                    self.backwards.clear()
                    self.outbound.clear()
                    self._take_early()

    def _forward(self, index: int, rung: Rung | None = None) -> None:
        rung = rung or self.spec.rungs[0]
        step = self.trainer.version + 1
        tokens = self.sampler.microbatch(step, index) if self.sampler and self.stage == 0 else None
        outbound = self.trainer.forward(
            step,
            index,
            tokens=tokens,
            inbound=self.inputs.get(index),
            rank=rung.rank,
            dtype=rung.dtype,
        )
        if outbound is not None:
            self.outbound[FrameKind.ACTIVATION, step, index] = outbound

    def _backward(self, index: int, gradient: Inbound | None) -> None:
        step = self.trainer.version + 1
        inbound = self.inputs.get(index)
        outbound = self.trainer.backward(
            step,
            index,
            gradient=gradient,
            rank=inbound.rank if inbound else 0,
            dtype=inbound.dtype if inbound else self.spec.boundary.dtype,
        )
        if outbound is not None:
            self.outbound[FrameKind.GRADIENT, step, index] = outbound
        self.backwards.add(index)


def _inbound(record: Record) -> Inbound:
    rank, dtype = msgpack.unpackb(record.header)
    return Inbound(record.payload, rank, WireDtype(dtype))
