"""What wrong input gets: an exit code that tells, and a sentence."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.config.spec import RunSpec
from tests.e2e.processes import Process, Swarm, tiny_spec


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A bootstrap with one peer, of stage 1."""
    swarm = Swarm(tmp_path_factory.mktemp("running"), tiny_spec())
    swarm.bootstrap()
    swarm.peer(1).wait_for(lambda event: event["event"] == "waiting" and event["missing_stages"] == [0, 2])
    yield swarm
    swarm.end()


def refused(process: Process, code: int, words: str) -> None:
    """The process ends with ``code`` and an error event that has ``words``."""
    assert process.exit_code() == code, (process.events, process.errors)
    error = process.kind("error")
    assert words in f"{error['what']} {error['meaning']} {error['remedy']}", error


def test_a_stage_outside_the_run(running: Swarm) -> None:
    refused(running.peer(7), 4, "Choose a stage from 0 to 2")


def test_a_stage_already_taken(running: Swarm) -> None:
    refused(running.peer(1, state="another"), 4, "Stage 1 is already taken")


def test_a_state_directory_in_use(running: Swarm) -> None:
    refused(running.peer(1), 1, "Another process uses the state directory")


def test_a_port_in_use(running: Swarm, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(running.peer(0, "--listen", f"127.0.0.1:{port}", state="port"), 2, f"port {port} is in use")


def test_an_unreachable_bootstrap(running: Swarm, new_swarm: Callable[[RunSpec], Swarm]) -> None:
    gone = new_swarm(tiny_spec())
    gone.bootstrap().end()
    refused(gone.peer(0), 3, "No bootstrap of the run answers")


def test_an_altered_invitation(running: Swarm, tmp_path: Path) -> None:
    text = running.invitation.read_text().strip()
    other = "A" if text[60] != "A" else "B"
    (tmp_path / "altered").write_text(text[:60] + other + text[61:])
    process = Process("peers.swarm_peer", "join", str(tmp_path / "altered"), "--stage", "0")
    running.started.append(process)
    refused(process, 4, "invitation")


def test_an_invitation_of_another_run(running: Swarm, new_swarm: Callable[[RunSpec], Swarm]) -> None:
    foreign = new_swarm(tiny_spec(seed=1))
    # The other run's invitation leads to our bootstrap: what a recycled address looks like.
    foreign.bootstrap("--announce", f"127.0.0.1:{running.port}").end()
    refused(foreign.peer(0), 4, "another run")


def test_an_expired_invitation(new_swarm: Callable[[RunSpec], Swarm]) -> None:
    swarm = new_swarm(tiny_spec())
    swarm.bootstrap("--expires", "1s")
    time.sleep(1.1)  # the invitation's own life, to the second
    refused(swarm.peer(0), 4, "expired")


def test_a_head_without_text(new_swarm: Callable[[RunSpec], Swarm], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    swarm = new_swarm(tiny_spec(data={"source": str(tmp_path / "empty")}))
    swarm.bootstrap()
    refused(swarm.peer(0), 2, "has no files")


def test_a_used_up_invitation(new_swarm: Callable[[RunSpec], Swarm]) -> None:
    swarm = new_swarm(tiny_spec())
    swarm.bootstrap("--uses", "1")
    swarm.peer(0).kind("enrolled")
    refused(swarm.peer(1), 4, "used up")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("[model]\nd_model = 100\nheads = 3", "d_model 100 is not divisible by heads 3"),
        ("[model]\nlayers = 2\nstages = 3", "layers 2 are fewer than stages 3"),
        ("[boundary]\nrank = 500", "boundary.rank 500 is above model.d_model 128"),
        ("[batch]\nsequences = 10\nmicrobatches = 4", "sequences 10 is not divisible by microbatches 4"),
        ("[model]\nlayer = 2", "model.layer: unknown key"),
        ("steps = 'many'", "steps"),
        ("steps = ", "is not TOML"),
    ],
)
def test_an_impossible_spec_is_refused_with_its_key(change: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(change)
    process = Process("peers.swarm_bootstrap", "--spec", str(tmp_path / "run.toml"))
    assert process.exit_code() == 2
    assert words in "".join(process.errors)
