"""Many faults in one run, drawn from a seed: links and sessions break, peers die, and bad frames come."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path

import pytest

from swarm.core.frame import FrameKind
from swarm.model.trainer import StageTrainer
from swarm.runtime.recovery import StageDisk
from tests.runtime.in_process import Fault, InProcessPeer, InProcessSwarm
from tests.runtime.test_swarm import assert_exact, assert_nothing_computed_twice, not_a_number, of_an_older_view

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

ACTIVATION, GRADIENT, EVALUATION = FrameKind.ACTIVATION, FrameKind.GRADIENT, FrameKind.EVALUATION
SEEDS = int(os.environ.get("SWARM_STORM_SEEDS", "4"))
"""More of them when it is asked for: each is a run of seconds."""

FAULTS = 8
STEPS = 12


def faults_of(swarm: InProcessSwarm) -> list[Fault]:
    """All kinds."""
    loop = asyncio.get_running_loop()
    closing: set[asyncio.Task[None]] = set()

    def link_closed(neighbours, target, header, payload):
        closing.add(neighbours.close_link(target))

    def link_closed_a_moment_later(neighbours, target, header, payload):
        neighbours.send_now(target, header, payload)
        closing.add(neighbours.close_link(target))

    def bad_frame(neighbours, target, header, payload):
        neighbours.send_now(target, *not_a_number(header, payload))
        neighbours.send_now(target, header, payload)

    def stale_frame(neighbours, target, header, payload):
        neighbours.send_now(target, *of_an_older_view(header, payload))
        neighbours.send_now(target, header, payload)

    def twice(neighbours, target, header, payload):
        neighbours.send_now(target, header, payload)
        neighbours.send_now(target, header, payload)

    def session_closed(neighbours, target, header, payload):
        neighbours.send_now(target, header, payload)
        session = swarm.peers[neighbours.stage].peer.session
        if session is not None:
            closing.add(loop.create_task(session.close("test", "a fault")))

    def killed(neighbours, target, header, payload):
        stage = neighbours.stage
        swarm.killed.add(stage)
        if swarm.spec.checkpoint.every > STEPS:
            copy = f"copy-{header.step}-{stage}-{header.microbatch}"
            swarm.peers[stage].kill(swarm.folder / copy)
            swarm.join(stage, state=copy)
        else:
            swarm.peers[stage].kill()
            closing.add(loop.create_task(joins_again(swarm.peers[stage])))

    async def joins_again(peer: InProcessPeer) -> None:
        await asyncio.wait({peer.task})
        swarm.join(peer.settings.stage)

    return [link_closed, link_closed_a_moment_later, bad_frame, stale_frame, twice, session_closed, killed]


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_breaks_the_losses_are_the_same_and_the_living_compute_nothing_twice(
    new_swarm, tmp_path, seed
) -> None:
    draw = random.Random(seed)
    checkpoints = seed % 2 == 1
    swarm: InProcessSwarm = new_swarm(steps=STEPS, checkpoint={"every": 2 if checkpoints else 1000})
    kinds = faults_of(swarm)
    frames = [(0, ACTIVATION), (1, ACTIVATION), (1, GRADIENT), (2, GRADIENT)]
    for _ in range(FAULTS):
        swarm.at(*draw.choice(frames), draw.randint(1, STEPS), draw.randrange(4), draw.choice(kinds))
    swarm.at(*draw.choice([(0, EVALUATION), (1, EVALUATION)]), draw.choice([5, 9]), 0, draw.choice(kinds))
    kept = None if checkpoints else keep_disk(swarm, draw.randrange(3), STEPS - 1, tmp_path / "kept")
    await swarm.start()
    await swarm.finish(60)
    assert_exact(swarm)
    assert kept is None or restored(swarm, *kept)
    for stage in swarm.killed:
        del swarm.peers[stage]
    assert_nothing_computed_twice(swarm)


def keep_disk(swarm: InProcessSwarm, stage: int, step: int, folder: Path) -> tuple[int, Path, list[tuple[int, str]]]:
    """When ``stage`` sends its first frame of ``step``, copy its disk and note its version and digest."""
    noted: list[tuple[int, str]] = []

    def copy(neighbours, target, header, payload):
        trainer = swarm.peers[stage].trainer
        noted.append((trainer.version, trainer.digest()))
        shutil.copytree(swarm.peers[stage].settings.state_dir / f"stage-{stage}", folder)
        neighbours.send_now(target, header, payload)

    swarm.at(stage, GRADIENT if stage else ACTIVATION, step, 0, copy)
    return stage, folder, noted


def restored(swarm: InProcessSwarm, stage: int, folder: Path, noted: list[tuple[int, str]]) -> bool:
    """Whether the copy leads back to what was noted, as it would after a kill at that moment."""
    ((version, digest),) = noted
    disk = StageDisk(swarm.spec, stage, folder, pytest.fail)
    trainer = StageTrainer(swarm.spec, stage, device="cpu")
    sampler = swarm.peers[stage].peer.runner.sampler
    found = disk.restore(trainer, sampler).version
    disk.close()
    assert found == version
    return trainer.digest() == digest
