"""Many peers start at the same moment with the same bootstrap."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from swarm.net.authority import Role
from tests.discovery.nodes import eventually, record
from tests.net.certified import member

STAGES = 3
DEADLINE_S = 120.0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("peers", [30, pytest.param(50, marks=pytest.mark.slow)])
async def test_a_crowd_ends_in_one_dht_and_each_finds_all(peers, node, record_property):
    began = time.monotonic()
    boot = await node("boot", role=Role.BOOTSTRAP)
    await boot.publish(record("boot", None, role=Role.BOOTSTRAP))
    imported_s = time.monotonic() - began

    async def join(number: int):
        directory = await node(f"peer{number}", boot)
        await directory.publish(record(f"peer{number}", number % STAGES))
        return directory

    began = time.monotonic()
    crowd = await asyncio.gather(*(join(number) for number in range(peers)))
    joined_s = time.monotonic() - began

    expected = {member(f"peer{number}").peer_id for number in range(peers)}
    coordinator = member("boot", Role.BOOTSTRAP).peer_id

    async def finds_all(directory) -> bool:
        stages = [await directory.find_stage(stage) for stage in range(STAGES)]
        found = {one.peer_id for stage in stages for one in stage}
        assert found <= expected
        return found == expected and (await directory.find_coordinator()).peer_id == coordinator

    for directory in (boot, *crowd):
        await eventually(lambda directory=directory: finds_all(directory), DEADLINE_S)
    found_s = time.monotonic() - began
    daemons = [psutil.Process(directory.daemon_pid).memory_info().rss for directory in crowd]
    figures = {
        "imported_s": round(imported_s, 1),
        "joined_and_published_s": round(joined_s, 1),
        "all_found_all_s": round(found_s, 1),
        "daemon_mib_mean": round(sum(daemons) / len(daemons) / 2**20),
        "daemon_mib_max": round(max(daemons) / 2**20),
        "process_mib": round(psutil.Process().memory_info().rss / 2**20),
    }
    for name, value in figures.items():
        record_property(name, value)
    print(figures)
    assert found_s < DEADLINE_S
