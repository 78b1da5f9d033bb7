"""Nobody calls anything without a certificate of the run; everybody learns why."""

import contextlib

import grpc
import pytest

from swarm.errors import InvitationError, RefusedError, SwarmError, UsageError
from swarm.net.authority import Role
from swarm.net.channel import MAX_MESSAGE_BYTES, failure, open_channel
from swarm.net.credentials import Credentials, caller_of
from swarm.net.server import PeerServer
from tests.net.certified import LIFETIME_S, authority, certified, identity, member

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

DEADLINE_S = 20.0


class Echo(grpc.GenericRpcHandler):
    """Answers what it was sent; ``no`` is refused, a stream gets everything back."""

    roles = frozenset({Role.PEER})
    stopped = False

    def service(self, handler_call_details):
        return {
            "/test.Echo/Unary": grpc.unary_unary_rpc_method_handler(self._unary),
            "/test.Echo/Stream": grpc.stream_stream_rpc_method_handler(self._stream),
        }.get(handler_call_details.method)

    async def _unary(self, request, context):
        if request == b"no":
            raise InvitationError("used up", meaning="m" * 5000, remedy="ask again")
        return request or caller_of(context).peer_id.encode()

    async def _stream(self, requests, context):
        while (data := await context.read()) is not grpc.aio.EOF:
            await context.write(data)

    async def stop(self):
        self.stopped = True


@contextlib.asynccontextmanager
async def echo_server(*services, **options):
    server = PeerServer(member("bob"), ["127.0.0.1:0"], services or [Echo()], **options)
    (address,) = await server.start()
    try:
        yield address
    finally:
        await server.stop(0.0)


async def call(address: str, credentials: Credentials, request: bytes = b"", server: str = "bob") -> bytes:
    channel = open_channel(address, credentials, member(server).peer_id, "test")
    try:
        return await channel.unary_unary("/test.Echo/Unary")(request, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        raise failure(error, "the server") from error
    finally:
        await channel.close()


async def stream(address: str, credentials: Credentials) -> bytes:
    channel = open_channel(address, credentials, member("bob").peer_id, "test")
    try:
        echo = channel.stream_stream("/test.Echo/Stream")(timeout=DEADLINE_S)
        await echo.write(b"x")
        return await echo.read()
    except grpc.aio.AioRpcError as error:
        raise failure(error, "the server") from error
    finally:
        await channel.close()


async def test_a_certified_peer_is_served_under_its_certified_name():
    async with echo_server() as address:
        assert await call(address, member("alice")) == member("alice").peer_id.encode()
        assert await stream(address, member("alice")) == b"x"


async def test_a_client_without_a_certificate_gets_nowhere():
    async with echo_server() as address:
        anonymous = grpc.ssl_channel_credentials(authority().pem)
        options = [("grpc.ssl_target_name_override", f"{member('bob').peer_id}.{authority().run_id}.swarm")]
        async with grpc.aio.secure_channel(address, anonymous, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/test.Echo/Unary")(b"", timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/test.Echo/Unary")(b"", timeout=DEADLINE_S)


async def test_a_member_of_another_run_is_refused_by_both_sides():
    foreign = member("alice", run_id="cd" * 16)
    async with echo_server() as address:
        with pytest.raises(RefusedError, match="do not accept each other's certificates"):
            await call(address, foreign)
        # One that overlooks who the server is fails as well: the server looks, too.
        fooled = grpc.ssl_channel_credentials(authority().pem, foreign.key_pem, foreign.certificate_pem)
        options = [("grpc.ssl_target_name_override", f"{member('bob').peer_id}.{authority().run_id}.swarm")]
        async with grpc.aio.secure_channel(address, fooled, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/test.Echo/Unary")(b"", timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_another_run_under_the_same_authority_is_refused_by_name():
    alice = identity("alice")
    sibling = Credentials.issue(authority("cd" * 16), alice, Role.PEER, LIFETIME_S)
    server_of_sibling = Credentials.issue(authority("cd" * 16), identity("bob"), Role.PEER, LIFETIME_S)
    server_of_sibling.run_id = authority().run_id
    server = PeerServer(server_of_sibling, ["127.0.0.1:0"], [Echo()])
    (address,) = await server.start()
    with pytest.raises(RefusedError, match=f"is of run {'cd' * 16}, and this is run {'ab' * 16}"):
        await call(address, sibling)
    await server.stop(0.0)


async def test_an_expired_certificate_is_refused_before_connecting():
    expired = Credentials.issue(authority(), identity("alice"), Role.PEER, 60.0, now_s=1e9)
    async with echo_server() as address:
        with pytest.raises(RefusedError, match="expired at 2001-09-09"):
            await call(address, expired)


@pytest.mark.parametrize("ask", [call, stream])
async def test_a_certificate_that_expires_on_an_open_connection_is_refused(ask):
    late = member("alice").expires_at_s + 1
    async with echo_server(clock=lambda: late) as address:
        with pytest.raises(RefusedError, match="expired at"):
            await ask(address, member("alice"))


@pytest.mark.parametrize("ask", [call, stream])
async def test_another_role_is_refused(ask):
    async with echo_server() as address:
        with pytest.raises(RefusedError, match="is one of role invitation"):
            await ask(address, member("guest", Role.INVITATION))


async def test_errors_of_services_reach_the_caller_as_they_are():
    async with echo_server() as address:
        with pytest.raises(InvitationError) as refused:
            await call(address, member("alice"), b"no")
        assert (refused.value.what, refused.value.meaning, refused.value.remedy) == ("used up", "m" * 1000, "ask again")


async def test_messages_have_a_limit():
    async with echo_server() as address:
        assert len(await call(address, member("alice"), bytes(MAX_MESSAGE_BYTES))) == MAX_MESSAGE_BYTES
        with pytest.raises(SwarmError, match="larger than max"):
            await call(address, member("alice"), bytes(MAX_MESSAGE_BYTES + 1))


async def test_a_port_in_use_is_named():
    async with echo_server() as address:
        port = address.rpartition(":")[2]
        with pytest.raises(UsageError, match=f"port {port} is in use"):
            await PeerServer(member("bob"), [address], []).start()


async def test_ipv4_ipv6_and_names_are_listened_on():
    server = PeerServer(member("bob"), ["127.0.0.1:0", "[::1]:0", "localhost:0"], [Echo()])
    bound = await server.start()
    assert [address.rpartition(":")[0] for address in bound] == ["127.0.0.1", "[::1]", "localhost"]
    for address in bound:
        assert await call(address, member("alice"), b"x") == b"x"
    await server.stop(0.0)


async def test_stopping_stops_the_services_and_is_safe_to_repeat():
    service = Echo()
    server = PeerServer(member("bob"), ["127.0.0.1:0"], [service])
    await server.stop(0.0)
    server = PeerServer(member("bob"), ["127.0.0.1:0"], [service])
    await server.start()
    await server.stop(0.0)
    await server.stop(0.0)
    assert service.stopped


async def test_the_name_of_every_peer_is_checked():
    assert len({credentials.peer_id for credentials in certified("alice", "bob", "carol")}) == 3
    async with echo_server() as address:
        with pytest.raises(RefusedError, match="do not accept each other's certificates"):
            await call(address, member("alice"), server="carol")
