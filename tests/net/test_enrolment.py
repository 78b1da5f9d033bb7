"""Enrolment on loopback: a stranger becomes a peer, stays one, and is told why when it does not."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import grpc
import pytest

from swarm.config.spec import RunSpec
from swarm.core.frame import PROTOCOL_VERSION
from swarm.errors import ClockSkewError, InvitationError, RefusedError, UnreachableError
from swarm.net import bootstrap as calls
from swarm.net.authority import Role, RunAuthority
from swarm.net.bootstrap import SERVICE, call_bootstrap
from swarm.net.credentials import Credentials
from swarm.net.enrolment import ENROLMENT_FILE, EnrolmentService, enrol, keep_issued, keep_renewed, load_enrolment
from swarm.net.identity import Identity
from swarm.net.invitation import Invitation, InvitationBook
from swarm.net.messages import message_class
from swarm.net.server import PeerServer

SPEC = RunSpec(name="enrolment-test")
OTHER_SPEC = RunSpec(name="another-run")
LIFETIME_S = 3600.0
DHT = ["/ip4/127.0.0.1/tcp/4001/p2p/Qm"]
DEADLINE_S = 10.0


class Bootstrap:
    """A bootstrap on loopback; the state directory is its memory."""

    def __init__(self, state_dir: Path, *, spec=SPEC, sent_spec=None, clock=time.time, lifetime_s=LIFETIME_S):
        self.identity = Identity.open(state_dir)
        self.authority = RunAuthority.open(state_dir, spec.run_id)
        self.book = InvitationBook(state_dir)
        self.credentials = Credentials.issue(self.authority, self.identity, Role.BOOTSTRAP, LIFETIME_S)
        self.service = EnrolmentService(
            self.authority,
            self.book,
            sent_spec or spec,
            dht_addresses=lambda: DHT,
            coordinator_id=self.identity.peer_id,
            certificate_lifetime_s=lifetime_s,
            clock=clock,
        )
        self.address = ""

    @contextlib.asynccontextmanager
    async def listening(self, host: str = "127.0.0.1"):
        server = PeerServer(self.credentials, [f"{host}:0"], [self.service])
        (self.address,) = await server.start()
        try:
            yield self
        finally:
            await server.stop(0)

    def invite(self, *more: str, uses: int = 3, lifetime_s: float = 600) -> Invitation:
        invitation = Invitation.create(
            self.authority, [*more, self.address], uses=uses, lifetime_s=lifetime_s, book=self.book
        )
        return Invitation.parse(invitation.encode(), accept_expired=True)


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def join(invitation: Invitation, identity: Identity | None = None, **options):
    return await enrol(invitation, identity or Identity.create(), deadline_s=DEADLINE_S, **options)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_an_invited_stranger_becomes_a_peer(tmp_path, host):
    identity = Identity.create()
    async with Bootstrap(tmp_path).listening(host) as bootstrap:
        enrolment = await join(bootstrap.invite(), identity)
    credentials = enrolment.credentials
    assert (credentials.peer_id, credentials.run_id) == (identity.peer_id, SPEC.run_id)
    assert (credentials.role, credentials.lifetime_s) == (Role.PEER, LIFETIME_S)
    assert (enrolment.spec, enrolment.dht_addresses) == (SPEC, tuple(DHT))
    assert enrolment.coordinator_id == bootstrap.identity.peer_id
    assert enrolment.coordinator_address == bootstrap.address


async def test_addresses_are_tried_until_one_answers(tmp_path):
    async with Bootstrap(tmp_path).listening() as bootstrap:
        dead = [closed_port(), "no-such-host.invalid:1"]
        enrolment = await join(bootstrap.invite(*dead))
    assert enrolment.bootstrap_addresses == (bootstrap.address, *dead)


async def test_thirty_strangers_at_the_same_moment_all_enrol(tmp_path):
    async with Bootstrap(tmp_path).listening() as bootstrap:
        invitation = bootstrap.invite(uses=30)
        enrolments = await asyncio.gather(*(join(invitation) for _ in range(30)))
        assert len({enrolment.credentials.peer_id for enrolment in enrolments}) == 30
        with pytest.raises(InvitationError, match="used up: 30 of 30"):
            await join(invitation)


async def test_an_unreachable_bootstrap_is_named_with_all_its_addresses(tmp_path):
    bootstrap = Bootstrap(tmp_path)
    bootstrap.address = closed_port()
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never says a word
    with silent:
        more = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError) as refusal:
            await enrol(bootstrap.invite(more), Identity.create(), deadline_s=2)
    assert f"{more}: no answer within" in refusal.value.what
    assert f"{bootstrap.address}: Connect call failed" in refusal.value.what
    assert refusal.value.exit_code == 3


async def test_a_server_without_tls_is_not_a_bootstrap(tmp_path):
    async def chatter(_reader, writer):
        writer.write(b"220 mail.example.org ESMTP\r\n")

    server = await asyncio.start_server(chatter, "127.0.0.1", 0)
    async with server:
        bootstrap = Bootstrap(tmp_path)
        bootstrap.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(UnreachableError, match="does not speak TLS"):
            await join(bootstrap.invite())


async def test_the_bootstrap_of_another_run_is_not_talked_to(tmp_path):
    async with Bootstrap(tmp_path / "other", spec=OTHER_SPEC).listening() as other:
        mine = Bootstrap(tmp_path / "mine")
        mine.address = other.address
        with pytest.raises(InvitationError, match=f"is not a bootstrap of run {SPEC.run_id}"):
            await join(mine.invite())


async def test_a_peer_of_the_run_cannot_pose_as_its_bootstrap(tmp_path):
    bootstrap = Bootstrap(tmp_path)
    bootstrap.credentials = Credentials.issue(bootstrap.authority, Identity.create(), Role.PEER, LIFETIME_S)
    async with bootstrap.listening():
        with pytest.raises(InvitationError, match="is not a bootstrap of run"):
            await join(bootstrap.invite())


async def test_an_invitation_of_an_authority_that_is_gone_is_foreign(tmp_path):
    old = Bootstrap(tmp_path / "old")
    async with Bootstrap(tmp_path / "new").listening() as bootstrap:
        old.address = bootstrap.address
        with pytest.raises(InvitationError, match="is not a bootstrap of run"):
            await join(old.invite())


async def test_used_up_revoked_unknown_and_expired_invitations_are_refused(tmp_path):
    async with Bootstrap(tmp_path).listening() as bootstrap:
        invitation = bootstrap.invite(uses=1)
        first = Identity.create()
        await join(invitation, first)
        await join(invitation, first)  # the same peer again: not another use
        with pytest.raises(InvitationError, match="used up: 1 of 1") as refusal:
            await join(invitation)
        assert (refusal.value.code, refusal.value.exit_code) == ("bad_invitation", 4)
        bootstrap.book.revoke(invitation.invitation_id)
        with pytest.raises(InvitationError, match="was revoked"):
            await join(invitation, first)
        expired = bootstrap.invite(lifetime_s=1)
        with pytest.raises(InvitationError, match="expired at"):
            await join(expired, clock=lambda: time.time() + 2)
        unknown = Invitation.create(bootstrap.authority, [bootstrap.address], uses=1, lifetime_s=60)
        with pytest.raises(InvitationError, match="not known to this bootstrap"):
            await join(unknown)


async def test_an_invitation_that_expired_by_the_clock_of_the_bootstrap_says_so(tmp_path):
    bootstrap = Bootstrap(tmp_path, clock=lambda: time.time() + 3600)
    async with bootstrap.listening():
        with pytest.raises(RefusedError, match="expired at"):
            await join(bootstrap.invite(lifetime_s=60))


async def test_another_protocol_version_is_refused_and_both_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "PROTOCOL_VERSION", PROTOCOL_VERSION + 6)
    async with Bootstrap(tmp_path).listening() as bootstrap:
        invitation = bootstrap.invite(uses=1)
        with pytest.raises(RefusedError, match=rf"version {PROTOCOL_VERSION + 6}, .* version {PROTOCOL_VERSION}\."):
            await join(invitation)
        monkeypatch.undo()
        await join(invitation)  # the refusal cost no use


async def test_a_spec_that_is_not_the_runs_is_refused(tmp_path):
    async with Bootstrap(tmp_path, sent_spec=OTHER_SPEC).listening() as bootstrap:
        with pytest.raises(RefusedError, match=f"is not that of run {SPEC.run_id}"):
            await join(bootstrap.invite(), state_dir=tmp_path / "peer")
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize("offset_s", [+5.0, -5.0, +90_000.0, -80_000.0])
async def test_a_clock_that_is_off_is_refused_with_its_offset(tmp_path, offset_s):
    async with Bootstrap(tmp_path, lifetime_s=1e6).listening() as bootstrap:
        with pytest.raises(ClockSkewError) as refusal:
            await join(bootstrap.invite(lifetime_s=1e6), clock=lambda: time.time() + offset_s)
    said = float(refusal.value.what.split("off by ")[1].split(" s")[0])
    assert said == pytest.approx(offset_s, abs=1.0)


@pytest.mark.parametrize("offset_s", [+1.5, -1.5])
async def test_small_offsets_are_allowed(tmp_path, offset_s):
    async with Bootstrap(tmp_path).listening() as bootstrap:
        await join(bootstrap.invite(), clock=lambda: time.time() + offset_s)


async def test_nobody_enrols_with_a_peers_certificate_or_renews_with_an_invitations(tmp_path):
    async with Bootstrap(tmp_path).listening() as bootstrap:
        invitation, identity = bootstrap.invite(), Identity.create()
        peer = (await join(invitation, identity)).credentials
        request = message_class("EnrolRequest")(
            csr=Identity.create().csr(), run_id=SPEC.run_id, protocol=PROTOCOL_VERSION, wall_s=time.time()
        ).SerializeToString()
        for shown, method, reason in [
            (peer, "Enrol", "this call is for invitation"),
            (invitation.credentials(), "Renew", "this call is for peer"),
            (peer, "Renew", f"Peer {identity.peer_id} asked for a certificate of peer"),
        ]:
            with pytest.raises(RefusedError, match=reason):
                await call_bootstrap([bootstrap.address], shown, f"/{SERVICE}/{method}", request)
        with pytest.raises(RefusedError, match="not an EnrolRequest"):
            await call_bootstrap([bootstrap.address], peer, f"/{SERVICE}/Renew", b"\xff garbage")


async def test_a_restarted_peer_needs_no_use_and_no_valid_invitation(tmp_path):
    identity = Identity.create()
    async with Bootstrap(tmp_path / "boot").listening() as bootstrap:
        invitation = bootstrap.invite(uses=1)
        first = await join(invitation, identity, state_dir=tmp_path)
        late = bootstrap.invite(lifetime_s=1)
        again = await join(late, identity, state_dir=tmp_path, clock=lambda: time.time() + 1.2)
        assert again.credentials.certificate_pem != first.credentials.certificate_pem
    kept = load_enrolment(tmp_path, identity, now_s=time.time())
    assert kept is not None
    assert kept.credentials.certificate_pem == again.credentials.certificate_pem
    assert (kept.spec, kept.coordinator_id) == (SPEC, bootstrap.identity.peer_id)
    # No bootstrap any more: what is kept will do.
    offline = await enrol(invitation, identity, state_dir=tmp_path, deadline_s=2)
    assert offline.credentials.certificate_pem == kept.credentials.certificate_pem


async def test_what_is_kept_is_only_used_while_it_is_valid_and_ones_own(tmp_path):
    identity, path = Identity.create(), tmp_path / ENROLMENT_FILE
    async with Bootstrap(tmp_path / "boot").listening() as bootstrap:
        await join(bootstrap.invite(), identity, state_dir=tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    assert b"PRIVATE" not in path.read_bytes()
    assert load_enrolment(tmp_path, identity, now_s=time.time() + LIFETIME_S) is None
    assert load_enrolment(tmp_path, Identity.create(), now_s=time.time()) is None
    path.write_bytes(path.read_bytes()[:-20])
    assert load_enrolment(tmp_path, identity, now_s=time.time()) is None


class Clock:
    """Time that passes by sleeping on it. ``until`` ends the task that sleeps beyond it."""

    def __init__(self, until_s: float = float("inf")) -> None:
        self.skipped_s = 0.0
        self.until_s = until_s

    def __call__(self) -> float:
        return time.time() + self.skipped_s

    async def sleep(self, seconds: float) -> None:
        self.skipped_s += seconds
        if self.skipped_s > self.until_s:
            raise asyncio.CancelledError


async def test_a_certificate_is_renewed_after_two_thirds_of_its_life(tmp_path):
    clock, identity, renewals = Clock(until_s=6000), Identity.create(), []
    bootstrap = Bootstrap(tmp_path / "boot", clock=clock)
    async with bootstrap.listening():
        enrolment = await join(bootstrap.invite(), identity, state_dir=tmp_path, clock=clock)
        credentials = enrolment.credentials
        credentials.on_renewed(lambda: renewals.append(clock.skipped_s))
        addresses = lambda: enrolment.bootstrap_addresses  # noqa: E731
        with pytest.raises(asyncio.CancelledError):
            await keep_renewed(credentials, identity, addresses, clock=clock, sleep=clock.sleep)
    assert renewals == pytest.approx([2400, 4800], abs=5)
    kept = load_enrolment(tmp_path, identity, now_s=clock())
    assert kept is not None
    assert kept.credentials.certificate_pem == credentials.certificate_pem


async def test_renewal_is_tried_until_the_certificate_expires(tmp_path):
    clock, identity = Clock(), Identity.create()
    bootstrap = Bootstrap(tmp_path)
    async with bootstrap.listening():
        credentials = (await join(bootstrap.invite(), identity)).credentials
    with pytest.raises(UnreachableError, match=r"expired at .* and could not be renewed: No bootstrap"):
        await keep_renewed(
            credentials, identity, lambda: [bootstrap.address], clock=clock, sleep=clock.sleep, deadline_s=1
        )
    assert LIFETIME_S <= clock.skipped_s < LIFETIME_S + 120


async def test_a_revoked_peer_is_not_renewed(tmp_path):
    clock, identity = Clock(), Identity.create()
    bootstrap = Bootstrap(tmp_path, clock=clock)
    async with bootstrap.listening():
        invitation = bootstrap.invite()
        credentials = (await join(invitation, identity)).credentials
        bootstrap.book.revoke(invitation.invitation_id)
        with pytest.raises(RefusedError, match=r"could not be renewed: .* was revoked"):
            await keep_renewed(credentials, identity, lambda: [bootstrap.address], clock=clock, sleep=clock.sleep)


async def test_the_bootstrap_renews_its_own(tmp_path):
    clock = Clock(until_s=6000)
    bootstrap = Bootstrap(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        await keep_issued(
            bootstrap.credentials, bootstrap.authority, bootstrap.identity, clock=clock, sleep=clock.sleep
        )
    assert bootstrap.credentials.expires_at_s == pytest.approx(time.time() + 4800 + LIFETIME_S, abs=10)
    assert bootstrap.credentials.role is Role.BOOTSTRAP


async def test_a_client_without_certificate_reaches_no_method(tmp_path):
    async with Bootstrap(tmp_path).listening() as bootstrap:
        options = [("grpc.ssl_target_name_override", f"bootstrap.{SPEC.run_id}.swarm")]
        shown = grpc.ssl_channel_credentials(bootstrap.authority.pem)
        async with grpc.aio.secure_channel(bootstrap.address, shown, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await channel.unary_unary(f"/{SERVICE}/Enrol")(b"", timeout=DEADLINE_S)


async def test_a_certificate_that_the_bootstrap_does_not_accept_is_told_from_a_dead_bootstrap(tmp_path):
    async with Bootstrap(tmp_path / "boot").listening() as bootstrap:
        invitation = bootstrap.invite()
        stranger = Credentials.issue(RunAuthority.create(SPEC.run_id), invitation.identity, Role.INVITATION, LIFETIME_S)
        stranger.authority_pem = bootstrap.authority.pem  # trusts the bootstrap, which does not trust it
        with pytest.raises(InvitationError, match="does not accept the invitation"):
            await call_bootstrap([bootstrap.address], stranger, f"/{SERVICE}/Enrol", b"", deadline_s=DEADLINE_S)
