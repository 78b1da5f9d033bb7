"""Bootstrap and peers in one loop: what they compute, and what becomes of faults at named points."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.core.frame import FrameKind
from swarm.core.messages import Apply
from swarm.errors import RefusedError
from swarm.observe.events import (
    FrameRefused,
    PeerLost,
    Restored,
    StepCommitted,
    Validation,
    ViewInstalled,
    Waiting,
    Warned,
)
from tests.e2e.test_training import reference
from tests.runtime.in_process import InProcessSwarm

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

ACTIVATION, GRADIENT = FrameKind.ACTIVATION, FrameKind.GRADIENT
NewSwarm = Callable[..., InProcessSwarm]


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


async def test_a_frame_that_is_lost_without_a_trace_is_repeated_when_the_step_is_found_stalled(
    new_swarm: NewSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.core.coordinator.STALL_FLOOR_S", 0.5)
    swarm = new_swarm()
    swarm.at(1, GRADIENT, 4, 2, lambda *frame: None)
    await swarm.start()
    await swarm.finish()
    (stalled,) = swarm.events.of(Warned)
    assert stalled.code == "stalled"
    assert "step 4" in stalled.what
    assert "not prepared: stages [0]" in stalled.what
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)


def not_a_number(header, payload):
    return header, memoryview(b"\xff" * len(payload))


def of_an_older_view(header, payload):
    return replace(header, view=header.view - 1), payload


def of_another_rank(header, payload):
    return replace(header, rank=header.rank + 1), payload


def from_somebody_else(header, payload):
    return replace(header, source_stage=header.target_stage, target_stage=header.source_stage), payload


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_a_number, "NaN"),
        (of_an_older_view, "its view"),
        (of_another_rank, "rank"),
        (from_somebody_else, "stage"),
    ],
)
@pytest.mark.parametrize(("stage", "kind"), [(0, ACTIVATION), (2, GRADIENT)])
async def test_a_bad_frame_is_refused_and_charged_to_its_sender_and_training_goes_on(
    spoil, reason: str, stage: int, kind: FrameKind, new_swarm: NewSwarm
) -> None:
    swarm = new_swarm()

    def spoiled(neighbours, target, header, payload):
        neighbours.send_now(target, *spoil(header, payload))
        neighbours.send_now(target, header, payload)

    swarm.at(stage, kind, 4, 1, spoiled)
    await swarm.start()
    await swarm.finish()
    assert swarm.refusals == {swarm.peers[stage].peer_id: 1}
    (told,) = swarm.peers[stage].events.of(FrameRefused)
    assert reason in told.reason
    assert views(swarm) == 1
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)


def closed_by_the_coordinator(swarm: InProcessSwarm):
    return swarm.session_of(1).close("test", "the coordinator closed it")


def closed_by_the_peer(swarm: InProcessSwarm):
    return swarm.peers[1].peer.session.close("test", "the peer closed it")


async def cut_off(swarm: InProcessSwarm) -> None:
    swarm.peers[1].peer.session._transport._call.cancel()


@pytest.mark.parametrize("close", [closed_by_the_coordinator, closed_by_the_peer, cut_off])
async def test_a_session_that_ends_in_mid_step_is_opened_again_and_costs_nothing(close, new_swarm: NewSwarm) -> None:
    swarm = new_swarm()
    closing = []

    def closed(neighbours, target, header, payload):
        closing.append(asyncio.create_task(close(swarm)))
        neighbours.send_now(target, header, payload)

    swarm.at(1, ACTIVATION, 4, 1, closed)
    await swarm.start()
    await swarm.finish()
    await asyncio.gather(*closing)
    (lost,) = swarm.events.of(PeerLost)[:1]
    assert (lost.stage, lost.peer_id) == (1, swarm.peers[1].peer_id)
    waiting = await swarm.peers[1].events.wait_for(Waiting, lambda event: "no coordinator" in event.reason)
    assert waiting.missing_stages == ()
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_commit_that_one_peer_does_not_hear_of_reaches_it_with_the_next_view(
    stage: int, new_swarm: NewSwarm
) -> None:
    swarm = new_swarm()
    await swarm.start()
    peer = swarm.peers[stage]
    await peer.ready()
    handle = peer.peer.runner.handle
    missed = []

    async def deaf(message):
        if isinstance(message, Apply) and message.commit.step == 4 and not missed:
            missed.append(message)
            await peer.peer.session.close("test", "its commit was lost")
        elif not missed or peer.peer.session.lost_reason is None:
            await handle(message)

    peer.peer.runner.handle = deaf
    await swarm.finish()
    assert missed
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)


async def test_a_peer_that_leaves_and_comes_back_finds_the_run_where_it_was(new_swarm: NewSwarm) -> None:
    swarm = new_swarm()
    left = asyncio.get_running_loop().create_future()

    def leaving(neighbours, target, header, payload):
        swarm.peers[1].task.cancel()
        left.set_result(None)

    swarm.at(1, GRADIENT, 5, 1, leaving)
    await swarm.start()
    await left
    await swarm.peers[1].stop()
    assert (await swarm.events.wait_for(PeerLost)).stage == 1
    back = swarm.join(1)
    assert (await back.events.wait_for(Restored)).step == 4
    await swarm.finish()
    assert_exact(swarm)
    del swarm.peers[1]
    assert_nothing_computed_twice(swarm)


async def test_training_outlives_the_certificates_it_began_with(new_swarm: NewSwarm) -> None:
    swarm = new_swarm(steps=100_000, evaluation={"every": 0})
    await swarm.start(certificate_lifetime_s=3.0)
    for peer in swarm.peers.values():
        await peer.ready()
    first = [peer.peer.enrolment.credentials.expires_at_s for peer in swarm.peers.values()]
    await swarm.events.wait_for(StepCommitted, lambda event: event.time > max(first) + 1)
    assert not any(peer.task.done() for peer in swarm.peers.values())
    assert all(peer.peer.enrolment.credentials.expires_at_s > time.time() for peer in swarm.peers.values())
    renewed = [event.stage for event in swarm.events.of(PeerLost) if "renewed" in event.reason]
    assert set(renewed) == {0, 1, 2}
    steps = list(swarm.events.losses)
    assert steps == list(range(1, len(steps) + 1))


async def test_a_coordinator_that_stops_between_its_decision_and_telling_it_keeps_the_decision(
    new_swarm: NewSwarm,
) -> None:
    swarm = new_swarm()
    await swarm.start(linger_s=math.inf)
    first, commits = swarm.events, swarm.coordinator._commits
    decide = commits.commit

    def decided(commit):
        decide(commit)
        if commit.step == 4:
            for session in swarm.coordinator._sessions.values():
                session._end("the coordinator was killed")
            swarm.bootstrap.cancel()

    commits.commit = decided
    await asyncio.wait({swarm.bootstrap}, timeout=20)
    assert list(first.losses) == [1, 2, 3, 4]
    await swarm.start(stages=[])
    await swarm.finish()
    assert list(swarm.events.losses) == [5, 6, 7, 8]
    swarm.events.seen[:0] = first.seen
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)


async def test_two_peers_for_one_stage_the_later_is_refused_and_the_run_goes_on(new_swarm: NewSwarm) -> None:
    swarm = new_swarm(steps=30, evaluation={"every": 30})
    await swarm.start()
    await swarm.events.wait_for(StepCommitted)
    first = swarm.peers[1]
    late = swarm.join(1, state="another")
    with pytest.raises(RefusedError, match=f"Stage 1 is already taken by peer {first.peer_id}"):
        await late.task
    swarm.peers[1] = first
    await swarm.finish()
    assert_exact(swarm)
    assert_nothing_computed_twice(swarm)
    assert views(swarm) == 1


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize(("stage", "kind"), EVERY_DIRECTION)
async def test_a_stage_killed_in_mid_step_comes_back_and_the_others_compute_nothing_twice(
    step: int, stage: int, kind: FrameKind, new_swarm: NewSwarm
) -> None:
    swarm = new_swarm()
    killed = asyncio.get_running_loop().create_future()

    def kill(neighbours, target, header, payload):
        swarm.peers[stage].kill(swarm.folder / "copy")
        killed.set_result(None)

    swarm.at(stage, kind, step, 1, kill)
    await swarm.start()
    await asyncio.wait_for(killed, 20)
    gone = swarm.peers[stage]
    back = swarm.join(stage, state="copy")
    await swarm.events.wait_for(Waiting, lambda event: event.missing_stages == (stage,))
    await swarm.finish()
    assert gone.peer_id == back.peer_id
    assert_exact(swarm)
    del swarm.peers[stage]
    assert_nothing_computed_twice(swarm)


async def test_a_peer_that_stumbles_over_a_result_ends_with_that_error_instead_of_standing_still(
    new_swarm: NewSwarm,
) -> None:
    swarm = new_swarm()

    def stumbles(neighbours, target, header, payload):
        raise AssertionError("a fault of this peer")

    swarm.at(1, ACTIVATION, 2, 0, stumbles)
    await swarm.start()
    with pytest.raises(AssertionError, match="a fault of this peer"):
        await asyncio.wait_for(swarm.peers[1].task, 20)
    assert (await swarm.events.wait_for(PeerLost)).stage == 1


async def test_a_peer_that_stumbles_over_a_frame_ends_with_that_error_too(new_swarm: NewSwarm) -> None:
    swarm = new_swarm()
    await swarm.start()
    await swarm.peers[1].ready()

    def stumbles(header, payload):
        raise AssertionError("a fault of this peer")

    swarm.peers[1].peer.runner.disk.append = stumbles
    with pytest.raises(AssertionError, match="a fault of this peer"):
        await asyncio.wait_for(swarm.peers[1].task, 20)
