"""The daemon dies, cannot come back, or is closed: what the others see, and what stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swarm.discovery import daemon
from swarm.discovery.daemon import PrivateFolder
from swarm.errors import SwarmError, UnreachableError
from tests.discovery.nodes import eventually, record, said, start
from tests.net.certified import member


@pytest.fixture(autouse=True)
def temporary(monkeypatch) -> Iterator[Path]:
    """A folder for temporary files of these tests alone; its path is short since that of a socket must be."""
    with tempfile.TemporaryDirectory(prefix="dht", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        assert not list(Path(folder).iterdir())


async def killed(directory) -> int:
    """Kill the daemon; returns when it is gone."""
    child = psutil.Process(directory.daemon_pid)
    child.send_signal(signal.SIGKILL)
    async with asyncio.timeout(5):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return child.pid


async def test_a_killed_daemon_comes_back_where_it_was_and_finds_and_is_found(node):
    boot = await node("boot")
    alice, bob = await node("alice", boot), await node("bob", boot)
    await bob.publish(record("bob"))
    await alice.publish(record("alice"))
    addresses, old = alice.addresses(), await killed(alice)
    # Finding waits until the daemon is back.
    assert said(await alice.find_peer(member("bob").peer_id)) == record("bob")
    assert alice.addresses() == addresses
    assert alice.daemon_pid not in (0, old)
    bob.forget(member("alice").peer_id)
    assert said(await bob.find_peer(member("alice").peer_id)) == record("alice")


async def test_the_bootstrap_of_all_loses_no_record_when_its_daemon_is_killed(node):
    boot = await node("boot")
    await boot.publish(record("boot"))
    alice = await node("alice", boot)
    await alice.publish(record("alice"))
    await alice.close()
    await killed(boot)
    assert said(await boot.find_peer(member("alice").peer_id)) == record("alice")
    bob = await node("bob", boot)
    assert said(await bob.find_peer(member("boot").peer_id)) == record("boot")


async def test_a_daemon_that_cannot_come_back_is_reported_once(node, monkeypatch):
    monkeypatch.setattr("swarm.discovery.directory.RESTART_PAUSE_S", 0.01)
    failed: asyncio.Queue[SwarmError] = asyncio.Queue()
    boot = await node("boot", on_failed=failed.put_nowait)
    port = int(boot.addresses()[0].split("/")[4])

    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(boot.daemon_pid, signal.SIGKILL)
        while thief.getsockname()[1] != port:
            with contextlib.suppress(OSError):
                thief.bind(("127.0.0.1", port))
        thief.listen(1)
        error = await asyncio.wait_for(failed.get(), 30)
    assert isinstance(error, UnreachableError)
    assert "could not be brought back in 5 attempts" in str(error)
    assert failed.empty()
    assert await asyncio.wait_for(boot.find_peer("anyone"), 6) is None


async def test_nothing_stays_behind_after_close(temporary):
    directory = await start("alice")
    child = psutil.Process(directory.daemon_pid)
    port = int(directory.addresses()[0].split("/")[4])
    (folder,) = temporary.iterdir()
    assert {path.name.split("-")[0] for path in folder.iterdir()} >= {"dht.key", "p2pd"}
    await directory.close()
    await directory.close()
    assert not child.is_running()
    assert list(temporary.iterdir()) == []
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("wait_s", [0.05, 0.15, 0.3, 1.0])
async def test_nothing_stays_behind_when_the_start_is_cancelled(temporary, wait_s):
    children = psutil.Process().children()
    starting = asyncio.create_task(start("alice", "/ip4/127.0.0.1/tcp/1/p2p/nobody"))
    await asyncio.wait([starting], timeout=wait_s)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert list(temporary.iterdir()) == []
    new = [child for child in psutil.Process().children() if child not in children]
    # One that was cut off while it was being started has ended, but the loop may not have collected it yet.
    assert [child for child in new if child.status() != psutil.STATUS_ZOMBIE] == []


KILLED = """
import asyncio
from tests.discovery.nodes import record, start
async def main():
    directory = await start("alice")
    await directory.publish(record("alice"))
    print(directory.daemon_pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_the_daemon_ends_with_a_killed_process_and_a_later_one_sweeps(temporary):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, stdout=asyncio.subprocess.PIPE)
    pid = int(await asyncio.wait_for(process.stdout.readline(), 60))
    process.kill()
    await process.wait()

    async def ended() -> bool:
        return not psutil.pid_exists(pid)

    await eventually(ended, 10)
    (left,) = temporary.iterdir()
    PrivateFolder().remove()
    assert list(temporary.iterdir()) == [left], "swept too early: a process that starts may not hold it yet"
    long_ago = time.time() - daemon.SWEEP_AFTER_S - 1
    os.utime(left, (long_ago, long_ago))
    PrivateFolder().remove()
    assert list(temporary.iterdir()) == []


def test_a_folder_in_use_is_not_swept():
    held = PrivateFolder()
    old = time.time() - daemon.SWEEP_AFTER_S - 1
    os.utime(held.path, (old, old))
    PrivateFolder().remove()
    assert held.path.exists()
    held.remove()
    assert not held.path.exists()
