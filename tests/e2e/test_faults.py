"""Processes die at named moments; no step is lost or repeated, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swarm.config.spec import RunSpec
from tests.e2e.processes import Process, Swarm, committed, tiny_spec
from tests.e2e.test_training import reference

NewSwarm = Callable[[RunSpec], Swarm]
LONG = 150
"""Steps of runs that something happens to in the middle."""


def assert_like_the_reference(bootstrap: Process, spec: RunSpec, folder: Path) -> None:
    losses, _ = reference(spec, folder)
    steps = committed(bootstrap)
    assert [event["step"] for event in steps] == list(range(1, spec.steps + 1))
    assert [event["loss"] for event in steps] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_peer_is_named_waited_for_and_costs_no_step(stage: int, new_swarm: NewSwarm, tmp_path: Path) -> None:
    spec = tiny_spec(steps=LONG, evaluation={"every": 75})
    swarm = new_swarm(spec)
    bootstrap = swarm.bootstrap("--linger", "10s")
    peers = swarm.peers()
    bootstrap.step(25)
    killed_at = time.monotonic()
    peers[stage].kill()
    for other in [bootstrap, *(peer for peer in peers if peer is not peers[stage])]:
        waiting = other.wait_for(lambda event: event["event"] == "waiting" and event["missing_stages"] == [stage], 10)
        assert waiting["seen_at"] - killed_at < 10
    back = swarm.peer(stage)
    restored = back.kind("restored")
    assert restored["step"] >= 24
    assert back.exit_code() == 0
    assert bootstrap.exit_code() == 0
    assert_like_the_reference(bootstrap, spec, tmp_path / "reference")


def test_a_killed_bootstrap_comes_back_with_its_identity_and_the_run_goes_on(
    new_swarm: NewSwarm, tmp_path: Path
) -> None:
    spec = tiny_spec(steps=LONG, evaluation={"every": 75})
    swarm = new_swarm(spec)
    first = swarm.bootstrap("--linger", "10s")
    peers = swarm.peers()
    first.step(20)
    first.kill()
    second = swarm.bootstrap("--linger", "10s")
    assert [peer.exit_code() for peer in peers] == [0, 0, 0]
    assert second.exit_code() == 0
    assert first.kind("started")["peer_id"] == second.kind("started")["peer_id"]
    losses, _ = reference(spec, tmp_path / "reference")
    seen = {event["step"]: event["loss"] for event in [*committed(first), *committed(second)]}
    assert sorted(seen) == list(range(1, LONG + 1))
    assert [seen[step] for step in sorted(seen)] == pytest.approx(losses, rel=1e-4)


def test_sigterm_ends_the_bootstrap_cleanly(new_swarm: NewSwarm) -> None:
    bootstrap = new_swarm(tiny_spec()).bootstrap()
    bootstrap.popen.send_signal(signal.SIGTERM)
    assert bootstrap.exit_code(5) == 0


def test_a_run_that_everybody_left_is_resumed(new_swarm: NewSwarm, tmp_path: Path) -> None:
    spec = tiny_spec(steps=LONG, evaluation={"every": 75})
    swarm = new_swarm(spec)
    first = swarm.bootstrap("--linger", "10s")
    peers = swarm.peers()
    first.step(15)
    for process in [*peers, first]:
        process.popen.send_signal(signal.SIGINT)
    assert {process.exit_code() for process in [*peers, first]} == {130}
    second = swarm.bootstrap("--linger", "10s")
    assert [peer.exit_code() for peer in swarm.peers()] == [0, 0, 0]
    losses, _ = reference(spec, tmp_path / "reference")
    steps = [event["step"] for event in [*committed(first), *committed(second)]]
    assert steps == list(range(1, LONG + 1)), "no step is lost or repeated"
    assert [event["loss"] for event in committed(second)] == pytest.approx(losses[len(committed(first)) :], rel=1e-4)


def test_a_dead_dht_daemon_is_started_again_and_training_goes_on(new_swarm: NewSwarm) -> None:
    spec = tiny_spec(steps=LONG, evaluation={"every": 75})
    swarm = new_swarm(spec)
    bootstrap = swarm.bootstrap("--linger", "10s")
    peers = swarm.peers()
    bootstrap.step(5)
    daemons = [child for child in psutil.Process(peers[1].popen.pid).children() if "p2pd" in child.name()]
    assert len(daemons) == 1
    daemons[0].kill()
    assert [peer.exit_code() for peer in peers] == [0, 0, 0]
    assert [event["step"] for event in committed(bootstrap)] == list(range(1, LONG + 1))


def test_a_corrupt_checkpoint_is_reported_and_the_one_before_it_used(new_swarm: NewSwarm, tmp_path: Path) -> None:
    spec = tiny_spec(steps=LONG, evaluation={"every": 75})
    swarm = new_swarm(spec)
    bootstrap = swarm.bootstrap("--linger", "10s")
    peers = swarm.peers()
    peers[1].wait_for(lambda event: event["event"] == "checkpoint" and event["step"] >= 20)
    peers[1].kill()
    newest = max((swarm.folder / "stage-1" / "stage-1" / "checkpoints").glob("*.safetensors"))
    with newest.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\xff" * 8)
    back = swarm.peer(1)
    warning = back.wait_for(lambda event: event["event"] == "warning" and event["code"] == "bad_checkpoint")
    assert newest.name in warning["what"]
    assert back.exit_code() == 0
    assert_like_the_reference(bootstrap, spec, tmp_path / "reference")


def test_ctrl_c_ends_the_demo_within_five_seconds_and_leaves_nothing(new_swarm: NewSwarm, tmp_path: Path) -> None:
    swarm = new_swarm(tiny_spec(steps=100_000))
    before = {path.name for path in Path("/tmp").glob("hivemind-*")}
    demo = Process("peers.swarm_peer", "demo", "--spec", str(swarm.folder / "run.toml"), "--keep", str(tmp_path / "d"))
    swarm.started.append(demo)
    demo.step(3)
    family = psutil.Process(demo.popen.pid).children(recursive=True)
    assert len(family) >= 8, "four processes, each with its DHT daemon"
    pressed = time.monotonic()
    demo.popen.send_signal(signal.SIGINT)
    assert demo.exit_code(6) == 130
    assert time.monotonic() - pressed < 5
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert {path.name for path in Path("/tmp").glob("hivemind-*")} <= before


@pytest.mark.slow
def test_training_outlives_the_certificates_it_began_with(new_swarm: NewSwarm) -> None:
    swarm = new_swarm(tiny_spec(steps=100_000, evaluation={"every": 0}))
    bootstrap = swarm.bootstrap("--certificates", "15s")
    peers = swarm.peers()
    bootstrap.step(5)
    for _ in range(7):
        # Two renewals of each peer, and a commit after each.
        seen = len(bootstrap.events)
        lost = bootstrap.kind("peer_lost", 30, after=seen)
        assert "renewed" in lost["reason"]
        bootstrap.kind("step", 30, after=len(bootstrap.events))
    assert [peer.popen.poll() for peer in peers] == [None, None, None]
    steps = [event["step"] for event in committed(bootstrap)]
    assert steps == list(range(1, len(steps) + 1))
