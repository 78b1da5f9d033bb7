"""A stage that is killed comes back from its disk to the bit, wherever it was."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.config.spec import RunSpec
from swarm.core.frame import FrameHeader, FrameKind
from swarm.core.messages import Commit, Span
from swarm.core.schedule import clip_scale
from swarm.errors import CheckpointError
from swarm.model.trainer import Inbound, Outbound, StageTrainer
from swarm.runtime.recovery import Restored, StageDisk
from tests.model.runs import RandomTokens, small_run

ACTIVATION, GRADIENT = FrameKind.ACTIVATION, FrameKind.GRADIENT


class Pipeline:
    """Three stages (or one) in this process, each writing what it receives to a disk of its own, as peers do."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.source = RandomTokens(spec)
        count = spec.model.stages
        self.stages = [StageTrainer(spec, stage, device="cpu") for stage in range(count)]
        self.disks = [self.disk(stage) for stage in range(count)]
        self.sent: dict[tuple[int, FrameKind, int, int], Outbound] = {}
        self.digests = [[stage.digest()] for stage in self.stages]

    def disk(self, stage: int) -> StageDisk:
        return StageDisk(self.spec, stage, self.folder / str(stage), pytest.fail)

    def receive(self, stage: int, kind: FrameKind, step: int, index: int, message: Outbound) -> Inbound:
        """A frame has arrived at ``stage``."""
        source = stage - 1 if kind is ACTIVATION else stage + 1
        rows, time = self.spec.batch.microbatch_sequences, self.spec.model.context
        header = FrameHeader(
            self.spec.run_id, 1, step, index, kind, source, stage, message.rank, message.dtype, rows, time, ()
        )
        self.disks[stage].append(header, message.payload)
        return Inbound(message.payload, message.rank, message.dtype)

    def forward(self, step: int, index: int, rank: int | None = None) -> None:
        """All forwards of a microbatch."""
        inbound = None
        for number, stage in enumerate(self.stages):
            tokens = self.source.microbatch(step, index) if number == 0 else None
            rank = self.spec.wire_rank if rank is None else rank
            dtype = self.spec.boundary.dtype
            sent = stage.forward(step, index, tokens=tokens, inbound=inbound, rank=rank, dtype=dtype)
            if sent is not None:
                self.sent[number, ACTIVATION, step, index] = sent
                inbound = self.receive(number + 1, ACTIVATION, step, index, sent)

    def backward(self, step: int, index: int, down_to: int = 0) -> None:
        """The backwards of a microbatch, from the last stage to ``down_to``."""
        gradient = None
        for number in reversed(range(down_to, len(self.stages))):
            rank = gradient.rank if gradient else self._rank(step, index)
            sent = self.stages[number].backward(
                step, index, gradient=gradient, rank=rank, dtype=self.spec.boundary.dtype
            )
            if sent is not None:
                self.sent[number, GRADIENT, step, index] = sent
                gradient = None
                if number > down_to:
                    gradient = self.receive(number - 1, GRADIENT, step, index, sent)

    def _rank(self, step: int, index: int) -> int:
        return self.sent[0, ACTIVATION, step, index].rank if len(self.stages) > 1 else self.spec.wire_rank

    def commit(self, step: int) -> None:
        """Everyone applies the step."""
        norm = sum(stage.squared_norm() for stage in self.stages)
        scale = clip_scale(norm, self.spec.optimizer.clip_norm)
        for stage, disk, digests in zip(self.stages, self.disks, self.digests, strict=True):
            disk.commit(Commit(step, scale, 1.0, norm**0.5))
            stage.apply(scale)
            digests.append(stage.digest())

    def step(self, step: int, order: tuple[int, ...] = (1, 0)) -> None:
        """A whole step; forwards run ahead of backwards, and these end in ``order``."""
        for index in range(self.spec.batch.microbatches):
            self.forward(step, index)
        for index in order:
            self.backward(step, index)
        self.commit(step)

    def save(self) -> None:
        for stage, disk in zip(self.stages, self.disks, strict=True):
            saving = disk.save(stage)
            assert saving is not None
            assert saving.result(10).step == stage.version

    def revive(self, stage: int, at_most: int | None = None) -> tuple[StageTrainer, Restored]:
        """What a new process makes of the disk of ``stage``."""
        self.disks[stage].close()
        self.disks[stage] = self.disk(stage)
        trainer = StageTrainer(self.spec, stage, device="cpu")
        source = self.source if stage == 0 else None
        return trainer, self.disks[stage].restore(trainer, source, at_most=at_most)

    def close(self) -> None:
        for disk in self.disks:
            disk.close()


@pytest.fixture
def opened(tmp_path) -> Iterator:
    pipelines: list[Pipeline] = []

    def open_pipeline(**sections) -> Pipeline:
        pipelines.append(Pipeline(small_run("anchored", "int8", **sections), tmp_path / str(len(pipelines))))
        return pipelines[-1]

    yield open_pipeline
    for pipeline in pipelines:
        pipeline.close()


@pytest.fixture
def pipeline(opened) -> Pipeline:
    return opened()


def same_message(a: Outbound, b: Outbound) -> bool:
    return (bytes(a.payload), a.rank, a.dtype) == (bytes(b.payload), b.rank, b.dtype)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_comes_back_from_checkpoint_and_journal_to_the_bit(pipeline, stage):
    pipeline.step(1)
    pipeline.step(2)
    pipeline.save()
    pipeline.step(3)
    pipeline.step(4, order=(0, 1))
    trainer, restored = pipeline.revive(stage)
    assert (restored.checkpoint, restored.replayed, restored.version, restored.backwards) == (2, 2, 4, ())
    assert trainer.digest() == pipeline.stages[stage].digest()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_before_the_first_checkpoint_it_comes_back_from_the_seed(pipeline, stage):
    pipeline.step(1)
    trainer, restored = pipeline.revive(stage)
    assert (restored.checkpoint, restored.replayed, restored.version) == (0, 1, 1)
    assert trainer.digest() == pipeline.digests[stage][1]


def test_a_single_stage_comes_back_from_commits_alone(opened):
    pipeline = opened(model={"stages": 1})
    for step in (1, 2):
        pipeline.step(step, order=(0, 1))
    pipeline.save()
    pipeline.step(3, order=(0, 1))
    trainer, restored = pipeline.revive(0)
    assert (restored.checkpoint, restored.version, restored.backwards) == (2, 3, ())
    assert trainer.digest() == pipeline.digests[0][3]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_revived_stage_goes_on_like_one_that_never_stopped(opened, stage):
    straight, broken = opened(), opened()
    for step in (1, 2):
        straight.step(step)
        broken.step(step)
    broken.stages[stage], _ = broken.revive(stage)
    straight.step(3)
    broken.step(3)
    assert broken.digests == straight.digests


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_unfinished_step_is_there_too(pipeline, stage):
    pipeline.step(1)
    pipeline.forward(2, 0)
    pipeline.forward(2, 1)
    pipeline.backward(2, 1)
    norm = pipeline.stages[stage].squared_norm()
    trainer, restored = pipeline.revive(stage)
    # The last stage computes its backward as soon as it has an input, so its journal gives both.
    assert restored.backwards == ((0, 1) if stage == 2 else (1,))
    if stage < 2:
        assert trainer.squared_norm() == norm
    for (kind, step, index), message in restored.outbound.items():
        if (stage, kind, step, index) in pipeline.sent:
            assert same_message(message, pipeline.sent[stage, kind, step, index])
    kinds = {0: {ACTIVATION}, 1: {ACTIVATION, GRADIENT}, 2: {GRADIENT}}[stage]
    assert {(kind, index) for kind, _, index in restored.outbound} >= {(kind, 1) for kind in kinds}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_unfinished_step_can_be_finished_after_it(pipeline, stage):
    pipeline.step(1)
    for index in (0, 1):
        pipeline.forward(2, index)
    for index in (0, 1):
        pipeline.backward(2, index)
    trainer, restored = pipeline.revive(stage)
    assert restored.backwards == (0, 1)
    norm = sum(each.squared_norm() for each in pipeline.stages)
    pipeline.commit(2)
    trainer.apply(clip_scale(norm, pipeline.spec.optimizer.clip_norm))
    assert trainer.digest() == pipeline.digests[stage][2]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_messages_of_lower_ranks_are_replayed_at_their_ranks(opened, stage):
    pipeline = opened(boundary={"ladder": (4, 2)})
    for index, rank in ((0, 2), (1, 4)):
        pipeline.forward(1, index, rank)
        pipeline.backward(1, index)
    pipeline.commit(1)
    trainer, _ = pipeline.revive(stage)
    assert trainer.digest() == pipeline.digests[stage][1]


@pytest.mark.parametrize("stage", [1, 2])
def test_frames_of_the_next_step_that_came_before_the_commit_are_kept(pipeline, stage):
    for index in (0, 1):
        pipeline.forward(1, index)
        pipeline.backward(1, index)
    # A neighbour has applied step 1 already and is ahead; this stage can only write its frame down.
    early = pipeline.sent[stage - 1, ACTIVATION, 1, 1]
    message = pipeline.receive(stage, ACTIVATION, 2, 0, early)
    pipeline.commit(1)
    live = pipeline.stages[stage]
    live.forward(2, 0, inbound=message, rank=4, dtype=message.dtype)
    if stage == 2:
        live.backward(2, 0, rank=4, dtype=message.dtype)
    trainer, restored = pipeline.revive(stage)
    assert restored.version == 1
    assert restored.backwards == ((0,) if stage == 2 else ())
    assert trainer.squared_norm() == live.squared_norm()
    assert trainer.digest() == pipeline.digests[stage][1]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_that_began_before_the_commit_of_the_one_before_is_replayed_whole(pipeline, monkeypatch, stage):
    disk = pipeline.disks[stage]
    append, commit, waiting = disk.append, disk.commit, []

    def append_then_commit(header, payload):
        append(header, payload)
        while waiting and header.step == 2:
            commit(waiting.pop())

    monkeypatch.setattr(disk, "commit", lambda each: waiting.append(each) if each.step == 1 else commit(each))
    monkeypatch.setattr(disk, "append", append_then_commit)
    pipeline.step(1)
    pipeline.step(2)
    trainer, restored = pipeline.revive(stage)
    assert restored.version == 2
    assert trainer.digest() == pipeline.digests[stage][2]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_going_back_reaches_the_step_asked_for_and_forgets_the_rest(pipeline, stage):
    for step in (1, 2):
        pipeline.step(step)
    pipeline.save()
    for step in (3, 4):
        pipeline.step(step)
    pipeline.forward(5, 0)
    for at_most in (3, 2):
        trainer, restored = pipeline.revive(stage, at_most)
        assert (restored.version, restored.backwards, restored.outbound) == (at_most, (), {})
        assert trainer.digest() == pipeline.digests[stage][at_most]
        again, unasked = pipeline.revive(stage)
        assert unasked.version == at_most
        assert again.digest() == trainer.digest()


def test_a_step_the_disk_does_not_reach_is_said(pipeline):
    pipeline.step(1)
    with pytest.raises(CheckpointError, match="Stage 1 was to go back to step 3 and only reached 1"):
        pipeline.revive(1, at_most=3)


@pytest.mark.parametrize(("checkpoints", "bridged_from"), [(1, 0), (2, 1), (3, 2)])
def test_a_broken_checkpoint_is_bridged_by_the_one_before_and_the_journal(tmp_path, checkpoints, bridged_from):
    pipeline = Pipeline(small_run(), tmp_path)
    for step in range(1, checkpoints + 1):
        pipeline.step(step)
        pipeline.save()
    pipeline.step(checkpoints + 1)
    pipeline.close()
    path = tmp_path / "1" / "checkpoints" / f"step-{checkpoints:010d}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    reported: list[CheckpointError] = []
    disk = StageDisk(pipeline.spec, 1, tmp_path / "1", reported.append)
    trainer = StageTrainer(pipeline.spec, 1, device="cpu")
    restored = disk.restore(trainer, None)
    disk.close()
    assert (restored.checkpoint, restored.version, len(reported)) == (bridged_from, checkpoints + 1, 1)
    assert trainer.digest() == pipeline.digests[1][checkpoints + 1]


def test_the_disk_tells_which_versions_it_leads_back_to(pipeline):
    disk = pipeline.disks[1]
    assert disk.restorable(0) == (Span(0, 0),)
    for step in (1, 2, 3):
        pipeline.step(step)
        pipeline.save()
    disk.flush().result(10)
    # Two checkpoints are kept, and the journal since the older of them.
    assert disk.restorable(3) == (Span(2, 3),)
    assert {record.step for record in disk.journal.replay(0)} == {3}


def test_a_journal_with_a_hole_stops_at_the_step_before_it(pipeline):
    pipeline.step(1)
    journal = pipeline.disks[1].journal
    append = journal.append
    journal.append = lambda kind, step, *rest: append(kind, step, *rest) if (kind, step) != (2, 2) else None
    for step in (2, 3):
        pipeline.step(step)
    trainer, restored = pipeline.revive(1)
    assert restored.version == 1
    assert trainer.digest() == pipeline.digests[1][1]


def test_a_full_disk_is_told_before_the_step_is_promised_and_training_goes_on(pipeline, monkeypatch):
    pipeline.forward(1, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        pipeline.backward(1, 0)
        with pytest.raises(CheckpointError, match="No space left on device"):
            pipeline.disks[1].flush().result(10)
    assert pipeline.disks[1].flush().result(10) is None


def test_a_second_checkpoint_waits_for_the_first(pipeline, monkeypatch):
    pipeline.step(1)
    disk, trainer = pipeline.disks[1], pipeline.stages[1]
    go = threading.Event()
    save = disk.store.save
    monkeypatch.setattr(disk.store, "save", lambda *args: go.wait(10) and save(*args))
    first = disk.save(trainer)
    assert disk.save(trainer) is None
    go.set()
    assert first is not None
    assert first.result(10).step == 1
    again = disk.save(trainer)
    assert again is not None
    assert again.result(10).step == 1
