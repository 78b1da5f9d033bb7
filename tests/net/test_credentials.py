"""Credentials: who gets in through TLS, who signed a record, and what a renewal changes."""

import contextlib
import time

import grpc
import pytest

from swarm.errors import RefusedError
from swarm.net.authority import Role, RunAuthority
from swarm.net.credentials import Caller, Credentials, caller_of, check_caller, server_name, verify_signed
from swarm.net.identity import Identity

RUN_ID = "ab" * 16
AUTHORITY = RunAuthority.create(RUN_ID)
FOREIGN = RunAuthority.create("cd" * 16)
BOB = Identity.create()


def credentials(authority=AUTHORITY, role=Role.PEER, lifetime_s=3600.0, identity=None) -> Credentials:
    return Credentials.issue(authority, identity or Identity.create(), role, lifetime_s)


@contextlib.asynccontextmanager
async def bob_listens(bob: Credentials):
    """A server that answers with what it knows of the caller."""

    async def who(_request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        caller = caller_of(context)
        return f"{caller.run_id} {caller.role} {caller.peer_id} {caller.expires_at_s:.0f}".encode()

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(who)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Who": method}),))
    port = server.add_secure_port("127.0.0.1:0", bob.server_credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def who_am_i(address: str, shown: grpc.ChannelCredentials, peer_id: str = BOB.peer_id) -> str:
    options = [
        ("grpc.ssl_target_name_override", server_name(peer_id, RUN_ID)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    async with grpc.aio.secure_channel(address, shown, options=options) as channel:
        return (await channel.unary_unary("/Test/Who")(b"", timeout=20)).decode()


@pytest.mark.parametrize("role", list(Role))
async def test_a_server_knows_run_role_peer_and_expiry_of_its_caller(role):
    alice = credentials(role=role)
    async with bob_listens(credentials(identity=BOB)) as address:
        answer = await who_am_i(address, alice.channel_credentials())
    assert answer == f"{RUN_ID} {role} {alice.peer_id} {alice.expires_at_s:.0f}"


STRANGERS = {
    "without certificate": lambda: grpc.ssl_channel_credentials(AUTHORITY.pem),
    "with another run's": lambda: grpc.ssl_channel_credentials(
        AUTHORITY.pem, credentials(FOREIGN).key_pem, credentials(FOREIGN).certificate_pem
    ),
    "with an expired one": lambda: credentials(lifetime_s=-5).channel_credentials(),
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_a_client_does_not_get_in(stranger):
    async with bob_listens(credentials(identity=BOB)) as address:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await who_am_i(address, STRANGERS[stranger]())
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "server",
    [
        credentials(FOREIGN, identity=BOB),  # another run's
        credentials(),  # another peer of the run
        credentials(role=Role.INVITATION, identity=BOB),
        credentials(lifetime_s=-5, identity=BOB),
    ],
    ids=["another run's", "another peer", "an invitation", "expired"],
)
async def test_a_client_does_not_talk_to_a_server_that_is_not_the_peer_it_wants(server):
    async with bob_listens(server) as address:
        with pytest.raises(grpc.aio.AioRpcError):
            await who_am_i(address, credentials().channel_credentials())


async def test_a_renewed_certificate_is_served_without_a_restart():
    bob = credentials(lifetime_s=-5, identity=BOB)
    told = []
    bob.on_renewed(lambda: told.append(bob.expires_at_s))
    async with bob_listens(bob) as address:
        with pytest.raises(grpc.aio.AioRpcError):
            await who_am_i(address, credentials().channel_credentials())
        bob.renewed(AUTHORITY.issue(BOB.csr(), role=Role.PEER, lifetime_s=600))
        assert await who_am_i(address, credentials().channel_credentials())
    assert told == [bob.expires_at_s]
    assert bob.lifetime_s == 600


def test_a_listener_can_leave():
    bob, told = credentials(identity=BOB), []
    bob.on_renewed(lambda: told.append(1))()
    bob.renewed(AUTHORITY.issue(BOB.csr(), role=Role.PEER, lifetime_s=600))
    assert told == []


@pytest.mark.parametrize(
    ("certificate", "reason"),
    [
        (credentials().certificate_pem, "not for peer"),
        (credentials(role=Role.BOOTSTRAP, identity=BOB).certificate_pem, "for bootstrap"),
        (credentials(FOREIGN, identity=BOB).certificate_pem, "not issued by the authority"),
        (b"garbage", "is none"),
    ],
)
def test_a_certificate_for_somebody_else_is_no_renewal(certificate, reason):
    bob = credentials(identity=BOB)
    before = bob.certificate_pem
    with pytest.raises(RefusedError, match=reason):
        bob.renewed(certificate)
    assert bob.certificate_pem == before


def test_a_caller_of_another_run_expired_or_in_the_wrong_role_is_refused():
    caller = Caller("ff" * 10, RUN_ID, Role.PEER, 1000.0)
    check_caller(caller, RUN_ID, 999.9, {Role.PEER, Role.BOOTSTRAP})
    with pytest.raises(RefusedError, match=r"is of run abab.*and this is run cdcd"):
        check_caller(caller, "cd" * 16, 0.0, {Role.PEER})
    with pytest.raises(RefusedError, match="expired at 1970-01-01 00:16:40 UTC"):
        check_caller(caller, RUN_ID, 1000.0, {Role.PEER})
    with pytest.raises(RefusedError, match="role peer, and this call is for invitation"):
        check_caller(caller, RUN_ID, 0.0, {Role.INVITATION})


def test_a_record_tells_who_signed_it():
    alice, bob = credentials(), credentials(identity=BOB)
    caller = bob.verify_record(b"data", alice.sign(b"data"), alice.certificate_der)
    assert caller == Caller(alice.peer_id, RUN_ID, Role.PEER, alice.expires_at_s)


ALICE = credentials()


@pytest.mark.parametrize(
    ("signer", "certificate", "data", "now_s", "reason"),
    [
        (ALICE, ALICE, b"other", 0, "not signed by"),
        (credentials(), ALICE, b"data", 0, "not signed by"),
        (credentials(FOREIGN), credentials(FOREIGN), b"data", 0, "not issued by the authority"),
        (ALICE, ALICE, b"data", 3700, "valid until"),
        (ALICE, ALICE, b"data", -90_000, "valid until"),
    ],
    ids=["other data", "other signer", "other run", "expired", "not yet"],
)
def test_a_record_that_no_member_signed_is_refused(signer, certificate, data, now_s, reason):
    with pytest.raises(RefusedError, match=reason):
        verify_signed(data, signer.sign(b"data"), certificate.certificate_der, AUTHORITY.pem, time.time() + now_s)


def test_garbage_and_invitations_sign_no_records():
    with pytest.raises(RefusedError, match="is none"):
        verify_signed(b"data", b"", b"garbage", AUTHORITY.pem, time.time())
    with pytest.raises(RefusedError, match="4096 is the limit"):
        verify_signed(b"data", b"", bytes(5000), AUTHORITY.pem, time.time())
    with pytest.raises(RefusedError, match="not signed"):
        verify_signed(b"data", b"garbage", ALICE.certificate_der, AUTHORITY.pem, time.time())
    guest = credentials(role=Role.INVITATION)
    with pytest.raises(RefusedError, match="only peers have records"):
        verify_signed(b"data", guest.sign(b"data"), guest.certificate_der, AUTHORITY.pem, time.time())


def test_the_text_of_credentials_shows_no_key():
    assert repr(ALICE) == f"Credentials(peer {ALICE.peer_id} of run {RUN_ID})"
