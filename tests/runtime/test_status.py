"""What a run looks like from outside, asked over the wire with an invitation."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from dataclasses import replace

import pytest

from swarm.core.messages import LinkReport
from swarm.core.view import Member
from swarm.errors import UnreachableError
from swarm.net.invitation import Invitation
from swarm.observe.events import PeerJoined
from swarm.runtime.status import RunStatus, query
from tests.runtime.in_process import InProcessSwarm

one_loop = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

UNKNOWN = RunStatus("ab", "tiny", "waiting", 0, 9, 3, math.nan, math.nan, 0, -1.0)
LINK = LinkReport("peer", 0, 1, -1.0, -1.0, 4, "fp32", 17.0, 0)


def test_what_is_unknown_is_null() -> None:
    fields = json.loads(json.dumps(replace(UNKNOWN, links=(LINK,)).as_dict(), allow_nan=False))
    assert (fields["loss"], fields["validation_loss"], fields["tokens_per_s"]) == (None, None, None)
    (link,) = fields["links"]
    assert (link["goodput_bytes_s"], link["rtt_s"], link["bytes_per_token"]) == (None, None, 17.0)


def test_what_is_known_is_told_as_it_is() -> None:
    link = replace(LINK, goodput_bytes_s=0.0, rtt_s=0.25)
    known = replace(UNKNOWN, loss=2.5, validation_loss=3.5, tokens_per_s=0.0, links=(link,), members=(Member(1, "p"),))
    fields = known.as_dict()
    assert (fields["loss"], fields["validation_loss"], fields["tokens_per_s"]) == (2.5, 3.5, 0.0)
    assert fields["links"] == ({"goodput_bytes_s": 0.0, "rtt_s": 0.25} | _rest(link),)
    assert fields["members"] == ({"stage": 1, "peer_id": "p"},)


def _rest(link: LinkReport) -> dict[str, object]:
    fields = RunStatus.as_dict(replace(UNKNOWN, links=(link,)))["links"]
    assert isinstance(fields, tuple)
    return {key: value for key, value in fields[0].items() if key not in ("goodput_bytes_s", "rtt_s")}


@one_loop
async def test_a_run_that_waits_for_peers_names_the_stages_that_are_missing(new_swarm) -> None:
    swarm: InProcessSwarm = new_swarm()
    await swarm.start(stages=[1])
    await swarm.events.wait_for(PeerJoined)
    status = await query(Invitation.parse(swarm.invitation))
    assert (status.run_id, status.run_name, status.stages, status.steps) == (swarm.spec.run_id, "tiny", 3, 8)
    assert (status.phase, status.step, status.missing_stages) == ("waiting", 0, (0, 2))
    assert status.members == (Member(1, swarm.peers[1].peer_id),)
    assert status.links == ()
    assert math.isnan(status.loss)
    assert status.tokens_per_s < 0


@one_loop
async def test_the_command_prints_one_json_object_with_null_for_what_is_unknown(new_swarm) -> None:
    swarm: InProcessSwarm = new_swarm()
    await swarm.start(stages=[])
    command = (sys.executable, "-m", "peers.swarm_peer", "status", swarm.invitation, "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert process.returncode == 0
    fields = json.loads(out, parse_constant=pytest.fail)
    assert (fields["event"], fields["phase"], fields["missing_stages"]) == ("status", "waiting", [0, 1, 2])
    assert (fields["loss"], fields["validation_loss"], fields["tokens_per_s"]) == (None, None, None)


@one_loop
async def test_a_finished_run_has_losses_and_a_rate_until_its_bootstrap_stops(new_swarm, monkeypatch) -> None:
    swarm: InProcessSwarm = new_swarm()
    await swarm.start(linger_s=math.inf)
    await asyncio.wait({peer.task for peer in swarm.peers.values()}, timeout=30)
    status = await query(Invitation.parse(swarm.invitation))
    assert (status.phase, status.step) == ("finished", 8)
    assert status.loss == pytest.approx(swarm.events.losses[8])
    assert status.validation_step == 8
    assert 0 < status.validation_loss < 6
    assert status.tokens_per_s > 0
    monkeypatch.setattr("swarm.runtime.status.DEADLINE_S", 1.0)
    swarm.bootstrap.cancel()
    await asyncio.wait({swarm.bootstrap}, timeout=10)
    with pytest.raises(UnreachableError):
        await query(Invitation.parse(swarm.invitation))
