"""The step protocol: coordinator and stages together, without sockets or clocks."""

from __future__ import annotations

import pytest

from swarm.core.coordinator import NoteKind
from tests.core.loopback import LoopbackSwarm, small_spec


def started(seed: int, **changes: object) -> LoopbackSwarm:
    swarm = LoopbackSwarm(small_spec(**changes), seed)
    for stage in range(swarm.spec.model.stages):
        swarm.join(stage)
    return swarm


def assert_done(swarm: LoopbackSwarm) -> None:
    steps = swarm.spec.steps
    assert [commit.step for commit in swarm.disk] == list(range(1, steps + 1))
    assert all(peer.finished and peer.protocol.version == steps for peer in swarm.peers.values())
    validated = sorted({note.step for note in swarm.notes if note.kind is NoteKind.VALIDATED})
    assert validated == [0, 2, 4]


@pytest.mark.parametrize("seed", range(20))
def test_every_step_commits_once_in_any_order_of_delivery(seed: int) -> None:
    swarm = started(seed)
    swarm.run()
    assert_done(swarm)
    assert set(swarm.computed.values()) == {1}


def test_one_stage_alone_trains_too() -> None:
    swarm = started(1, model={"d_model": 16, "layers": 2, "heads": 2, "kv_heads": 1, "context": 8, "stages": 1})
    swarm.run()
    assert_done(swarm)


@pytest.mark.parametrize("seed", range(150))
def test_a_killed_peer_costs_no_step_and_repeats_none(seed: int) -> None:
    swarm = started(seed)
    for _ in range(3):
        for _ in range(swarm.random.randrange(120)):
            swarm.event()
        stage = swarm.random.randrange(3)
        swarm.kill(stage)
        for _ in range(swarm.random.randrange(40)):
            swarm.event()
        swarm.join(stage)
    swarm.run()
    assert_done(swarm)


@pytest.mark.parametrize("seed", range(150))
def test_a_killed_coordinator_keeps_its_decisions(seed: int) -> None:
    swarm = started(seed)
    for _ in range(3):
        for _ in range(swarm.random.randrange(120)):
            swarm.event()
        swarm.kill_coordinator()
    swarm.run()
    assert_done(swarm)


@pytest.mark.parametrize("seed", range(50))
def test_only_the_work_of_the_dead_peer_is_computed_again(seed: int) -> None:
    swarm = started(seed)
    for _ in range(swarm.random.randrange(150)):
        swarm.event()
    swarm.kill(1)
    swarm.run()
    swarm.join(1)
    swarm.run()
    assert_done(swarm)
    assert {key for key, count in swarm.computed.items() if count > 1} <= {
        (1, step, index) for step in range(1, 5) for index in range(3)
    }


def test_a_missing_stage_is_named_and_waited_for() -> None:
    swarm = started(0)
    for _ in range(30):
        swarm.event()
    swarm.kill(2)
    swarm.run()
    waiting = [note for note in swarm.notes if note.kind is NoteKind.WAITING]
    assert waiting[-1].stages == (2,)
    assert swarm.coordinator.missing_stages == (2,)
