"""A session whose other end hangs or dies is lost, and says why: real processes, stopped and killed."""

import asyncio
import contextlib
import json
import re
import signal
import sys
import time

import pytest

from swarm.net.server import PeerServer
from swarm.net.session import Session, SessionService, open_session
from tests.net.certified import member
from tests.net.far_end import credentials_fields

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

DEADLINE_S = 30.0
HEARTBEAT_S = 0.2


@contextlib.asynccontextmanager
async def far_end(name: str, server: tuple[str, str] | None = None):
    """A process with the certificate of ``name``; gives it and the line it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.net.far_end", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    order = {"credentials": credentials_fields(member(name)), "server": server, "heartbeat_s": HEARTBEAT_S}
    process.stdin.write(json.dumps(order).encode() + b"\n")
    try:
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
        yield process, line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def both_ways(side: str):
    """A session whose other end is a process of its own: as its client, or as its server."""
    if side == "client":
        async with far_end("bob") as (process, address):
            bob = member("bob").peer_id
            session = await open_session(address, member("alice"), bob, DEADLINE_S, heartbeat_s=HEARTBEAT_S)
            yield process, session
            await session.close("done", "the test is over")
        return
    arrived: asyncio.Future[Session] = asyncio.get_running_loop().create_future()

    async def on_session(session: Session) -> None:
        arrived.set_result(session)
        await session.wait_over()

    server = PeerServer(member("bob"), ["127.0.0.1:0"], [SessionService(on_session, heartbeat_s=HEARTBEAT_S)])
    (address,) = await server.start()
    async with far_end("alice", (address, member("bob").peer_id)) as (process, _):
        yield process, await asyncio.wait_for(arrived, DEADLINE_S)
    await server.stop(0.0)


async def answers(session: Session) -> None:
    await session.send(b"x")
    assert await asyncio.wait_for(anext(session), DEADLINE_S) == b"x"


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_stopped_process_is_lost_although_its_connection_stands(side):
    async with both_ways(side) as (process, session):
        await answers(session)
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        reason = await asyncio.wait_for(session.wait_over(), DEADLINE_S)
        assert re.fullmatch(r"silent for \d+\.\d s", reason)
        assert 2 * HEARTBEAT_S < time.monotonic() - began < 3.0 + 30 * HEARTBEAT_S
        assert [message async for message in session] == []
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("side", ["client", "server"])
async def test_a_killed_process_is_lost_at_once(side):
    async with both_ways(side) as (process, session):
        await answers(session)
        process.kill()
        began = time.monotonic()
        assert await asyncio.wait_for(session.wait_over(), DEADLINE_S) == "connection closed"
        assert time.monotonic() - began < 2.0
