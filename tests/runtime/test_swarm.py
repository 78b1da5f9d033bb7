"""Bootstrap and peers in one loop: what they compute, and what becomes of faults at named points."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from swarm.core.frame import FrameKind
from swarm.observe.events import Validation, ViewInstalled
from tests.e2e.test_training import reference
from tests.runtime.in_process import InProcessSwarm, short_spec

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

ACTIVATION, GRADIENT = FrameKind.ACTIVATION, FrameKind.GRADIENT
NewSwarm = Callable[..., InProcessSwarm]


@pytest_asyncio.fixture(loop_scope="session")
async def new_swarm(tmp_path: Path) -> AsyncIterator[NewSwarm]:
    """Makes swarms that have stopped when the test is over; keywords change the spec."""
    swarms: list[InProcessSwarm] = []

    def make(**changes) -> InProcessSwarm:
        folder = tmp_path / f"swarm-{len(swarms)}"
        folder.mkdir()
        swarms.append(InProcessSwarm(short_spec(tmp_path, **changes), folder, pytest.MonkeyPatch()))
        return swarms[-1]

    yield make
    for swarm in swarms:
        await swarm.end()


def assert_exact(swarm: InProcessSwarm) -> None:
    """Every step was committed once, with the losses of a single process."""
    losses, validation = reference(swarm.spec, swarm.folder / "reference")
    assert swarm.events.losses == pytest.approx(dict(enumerate(losses, start=1)), rel=1e-4)
    seen = {event.step: event.loss for event in swarm.events.of(Validation)}
    assert seen == pytest.approx(validation, rel=1e-4)


def assert_nothing_computed_twice(swarm: InProcessSwarm) -> None:
    spec = swarm.spec
    once = {
        (work, step, index): 1
        for work in ("forward", "backward")
        for step in range(1, spec.steps + 1)
        for index in range(spec.batch.microbatches)
    }
    for stage, peer in swarm.peers.items():
        assert dict(peer.trainer.computed) == once, f"stage {stage}"


def views(swarm: InProcessSwarm) -> int:
    return len(swarm.events.of(ViewInstalled))


async def test_it_trains_what_the_reference_trains_and_computes_nothing_twice(new_swarm: NewSwarm) -> None:
    swarm = new_swarm()
    await swarm.start()
    await swarm.finish()
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)
    assert views(swarm) >= 1
    assert not swarm.refusals


EVERY_DIRECTION = [(0, ACTIVATION), (1, ACTIVATION), (1, GRADIENT), (2, GRADIENT)]


@pytest.mark.parametrize(("stage", "kind"), EVERY_DIRECTION)
async def test_a_link_that_breaks_before_a_frame_is_repaired_by_a_new_view(
    stage: int, kind: FrameKind, new_swarm: NewSwarm
) -> None:
    swarm = new_swarm()

    def broken(neighbours, target, header, payload):
        neighbours.close_link(target)
        asyncio.get_running_loop().call_later(0.05, neighbours.send_now, target, header, payload)

    swarm.at(stage, kind, 4, 1, broken)
    await swarm.start()
    await swarm.finish()
    assert not swarm.faults
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)


@pytest.mark.parametrize(("stage", "kind"), EVERY_DIRECTION)
async def test_a_frame_that_is_lost_with_its_link_is_repeated(stage: int, kind: FrameKind, new_swarm: NewSwarm) -> None:
    swarm = new_swarm()

    def lost(neighbours, target, header, payload):
        neighbours.close_link(target)

    # The last microbatch: nothing else is sent over the link that would show that it is broken.
    swarm.at(stage, kind, 4, 3, lost)
    await swarm.start()
    await swarm.finish(10)
    assert not swarm.faults
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)
