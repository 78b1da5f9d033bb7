"""The control session: messages, farewells, refusals, overflow and loss."""

import asyncio
import contextlib
import socket

import pytest

from swarm.errors import InvitationError, RefusedError, SwarmError, UnreachableError, UsageError
from swarm.net import session as sessions
from swarm.net.server import PeerServer
from swarm.net.session import MAX_MESSAGE_BYTES, MAX_SESSIONS_PER_PEER, Session, SessionService, open_session
from tests.net.certified import certified

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

DEADLINE_S = 20.0
HEARTBEAT_S = 0.1


@contextlib.asynccontextmanager
async def coordinator(on_session):
    _, bob = certified("alice", "bob")
    server = PeerServer(bob, ["127.0.0.1:0"], [SessionService(on_session, heartbeat_s=HEARTBEAT_S)])
    (address,) = await server.start()
    try:
        yield address, server
    finally:
        await server.stop(0.0)


async def enter(address: str, whom: str = "bob") -> Session:
    alice, peer = certified("alice", whom)
    return await open_session(address, alice, peer.peer_id, DEADLINE_S, heartbeat_s=HEARTBEAT_S)


async def echo(session: Session) -> None:
    async for message in session:
        await session.send(message)


async def rest_of(session: Session) -> list[bytes]:
    async with asyncio.timeout(DEADLINE_S):
        return [message async for message in session]


async def test_messages_of_both_directions_arrive_in_order():
    async with coordinator(echo) as (address, _):
        session = await enter(address)
        sent = [b"", b"a", bytes(MAX_MESSAGE_BYTES), *(str(n).encode() for n in range(200))]
        for message in sent:
            await session.send(message)
        assert [await anext(session) for _ in sent] == sent
        await session.close("done", "enough")


async def test_the_coordinator_knows_the_certified_name_of_the_peer():
    async def name(session: Session) -> None:
        await session.send(session.peer_id.encode())

    async with coordinator(name) as (address, _):
        session = await enter(address)
        alice, bob = certified("alice", "bob")
        assert session.peer_id == bob.peer_id
        assert await rest_of(session) == [alice.peer_id.encode()]


async def test_heartbeats_measure_round_trip_and_clock_offset():
    async with coordinator(echo) as (address, _):
        session = await enter(address)
        async with asyncio.timeout(DEADLINE_S):
            while session.rtt_s is None:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(HEARTBEAT_S)
        assert 0 < session.rtt_s < 1
        assert abs(session.clock_offset_s) < 1
        assert session.timeout_s == pytest.approx(3 * HEARTBEAT_S, rel=2)
        await session.close("done", "enough")


async def test_a_farewell_brings_code_and_reason_after_what_was_sent_before():
    ended = asyncio.get_running_loop().create_future()

    async def listen(session: Session) -> None:
        messages = [message async for message in session]
        ended.set_result((messages, session.close_code, session.lost_reason))

    async with coordinator(listen) as (address, _):
        session = await enter(address)
        for n in range(100):
            await session.send(bytes([n]))
        await session.close("leaving", "the user pressed Ctrl-C")
        messages, code, reason = await asyncio.wait_for(ended, DEADLINE_S)
        assert messages == [bytes([n]) for n in range(100)]
        assert (code, reason) == ("leaving", "closed by the other end: the user pressed Ctrl-C")
        assert (session.close_code, session.lost_reason) == ("leaving", "closed: the user pressed Ctrl-C")
        with pytest.raises(UnreachableError, match="is over: closed"):
            await session.send(b"more")


async def test_the_last_messages_of_the_coordinator_arrive_before_the_end():
    async def speak(session: Session) -> None:
        for n in range(50):
            await session.send(bytes([n]))

    async with coordinator(speak) as (address, _):
        session = await enter(address)
        assert await rest_of(session) == [bytes([n]) for n in range(50)], session.lost_reason
        assert session.close_code == "done"


async def test_a_refusal_is_the_same_error_on_the_other_side():
    async def refuse(session: Session) -> None:
        raise InvitationError("used up", meaning="no way in", remedy="ask for another")

    async with coordinator(refuse) as (address, _):
        with pytest.raises(InvitationError) as refused:
            await rest_of(await enter(address))
        assert refused.value.as_dict() == {
            "code": "bad_invitation",
            "what": "used up",
            "meaning": "no way in",
            "remedy": "ask for another",
        }


async def test_a_fault_of_the_coordinator_closes_the_session():
    async def fail(session: Session) -> None:
        raise ZeroDivisionError

    async with coordinator(fail) as (address, _):
        session = await enter(address)
        assert await rest_of(session) == []
        assert session.close_code == "failed"


async def test_a_stopping_server_says_so():
    async with coordinator(echo) as (address, server):
        session = await enter(address)
        await server.stop(5.0)
        assert await rest_of(session) == []
        assert session.close_code == "stopping"


async def test_a_message_above_the_limit_is_refused_and_the_session_goes_on():
    async with coordinator(echo) as (address, _):
        session = await enter(address)
        with pytest.raises(UsageError, match="1048577 bytes"):
            await session.send(bytes(MAX_MESSAGE_BYTES + 1))
        await session.send(b"x")
        assert await anext(session) == b"x"
        await session.close("done", "enough")


async def test_a_queue_that_overflows_ends_the_session(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_QUEUED_MESSAGES", 10)
    async with coordinator(lambda session: session.wait_over()) as (address, _):
        session = await enter(address)
        for _ in range(10):
            await session.send(b"x")
        with pytest.raises(UnreachableError, match="10 messages wait to be sent"):
            await session.send(b"x")
        assert await rest_of(session) == []


async def test_messages_that_nobody_takes_end_the_session(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_QUEUED_MESSAGES", 10)
    reason = asyncio.get_running_loop().create_future()

    async def ignore(session: Session) -> None:
        reason.set_result(await session.wait_over())

    async with coordinator(ignore) as (address, _):
        session = await enter(address)
        for n in range(11):
            await session.send(bytes([n]))
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(reason, DEADLINE_S) == "11 messages came that this end did not take"
        await session.close("done", "enough")


async def test_nobody_listening_and_a_silent_listener_are_unreachable():
    with pytest.raises(UnreachableError, match=r"Cannot reach peer .* at 127\.0\.0\.1:1: .*refused"):
        await enter("127.0.0.1:1")
    alice, bob = certified("alice", "bob")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"):
            await open_session(address, alice, bob.peer_id, 0.2)


async def test_a_peer_has_a_few_sessions_at_most():
    async with coordinator(echo) as (address, _):
        held = [await enter(address) for _ in range(MAX_SESSIONS_PER_PEER)]
        with pytest.raises(RefusedError, match="has 4 sessions already"):
            await enter(address)
        await held.pop().close("done", "enough")
        held.append(await enter(address))
        await asyncio.gather(*(session.close("done", "enough") for session in held))


async def test_another_peer_at_that_address_is_refused():
    async with coordinator(echo) as (address, _):
        with pytest.raises(RefusedError, match="certificates"):
            await enter(address, "carol")


async def test_a_session_without_the_service_is_refused():
    _, bob = certified("alice", "bob")
    server = PeerServer(bob, ["127.0.0.1:0"], [])
    (address,) = await server.start()
    with pytest.raises(SwarmError, match="does not offer"):
        await enter(address)
    await server.stop(0.0)
