"""How a stranger with an invitation becomes a peer with a certificate, and stays one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf.message import DecodeError

from swarm.config.spec import RunSpec
from swarm.core.frame import PROTOCOL_VERSION
from swarm.errors import ClockSkewError, RefusedError, SwarmError, UnreachableError
from swarm.net.authority import Role, RunAuthority, peer_id_of_csr
from swarm.net.bootstrap import DEADLINE_S, MAX_CLOCK_SKEW_S, SERVICE, clock_skew, request_certificate
from swarm.net.credentials import Caller, Credentials, caller_of, check_caller, instant
from swarm.net.identity import Identity
from swarm.net.invitation import Invitation, InvitationBook
from swarm.net.messages import message_class
from swarm.net.private import read_private, write_private

log = logging.getLogger(__name__)

ENROLMENT_FILE = "enrolment.json"

CERTIFICATE_LIFETIME_S = 86_400.0
RENEW_AT = 2 / 3
"""Share of a certificate's life after which it is renewed."""

MAX_TRANSIT_S = 60.0
"""A request that looks older than this comes from a clock that is behind."""

LOOK_AGAIN_S = 60.0
"""Longest sleep until a renewal: after a machine was suspended, the clock has jumped."""

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0

Sleep = Callable[[float], Awaitable[object]]


@dataclass(frozen=True)
class Enrolment:
    """What a peer knows of its run after enrolling."""

    credentials: Credentials
    spec: RunSpec
    dht_addresses: tuple[str, ...]
    """Multiaddresses at which the DHT can be entered."""
    coordinator_id: str
    """Peer id of the run's first coordinator."""
    bootstrap_addresses: tuple[str, ...]
    """host:port, the one that answered first."""

    @property
    def coordinator_address(self) -> str:
        """Where the first coordinator answered, host:port."""
        return self.bootstrap_addresses[0]


class EnrolmentService(grpc.GenericRpcHandler):
    """The bootstrap's side: certificates for invited peers, and new ones for those that have one.

    Args:
        dht_addresses: asked at each enrolment.
        coordinator_id: peer id of the run's first coordinator.
        certificate_lifetime_s: of the certificates issued.
        clock: seconds since the epoch.
    """

    roles = frozenset({Role.INVITATION, Role.PEER})

    def __init__(
        self,
        authority: RunAuthority,
        book: InvitationBook,
        spec: RunSpec,
        *,
        dht_addresses: Callable[[], Iterable[str]],
        coordinator_id: str,
        certificate_lifetime_s: float = CERTIFICATE_LIFETIME_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._authority = authority
        self._book = book
        self._spec_json = spec.canonical_json()
        self._dht_addresses = dht_addresses
        self._coordinator_id = coordinator_id
        self._lifetime_s = certificate_lifetime_s
        self._clock = clock
        self._methods = {
            f"/{SERVICE}/Enrol": grpc.unary_unary_rpc_method_handler(self._enrol),
            f"/{SERVICE}/Renew": grpc.unary_unary_rpc_method_handler(self._renew),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._methods.get(handler_call_details.method)

    async def _enrol(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        caller = self._caller(context, Role.INVITATION)
        request = self._request(data)
        peer_id = peer_id_of_csr(request.csr)
        left = await asyncio.to_thread(self._book.redeem, caller.peer_id, peer_id, now_s=self._clock())
        log.info("Peer %s enrolled with invitation %s; uses left: %d.", peer_id, caller.peer_id, left)
        return self._reply(request)

    async def _renew(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        caller = self._caller(context, Role.PEER)
        request = self._request(data)
        peer_id = peer_id_of_csr(request.csr)
        if peer_id != caller.peer_id:
            raise RefusedError(f"Peer {caller.peer_id} asked for a certificate of peer {peer_id}.")
        await asyncio.to_thread(self._book.check_renewable, peer_id)
        return self._reply(request)

    def _caller(self, context: grpc.aio.ServicerContext, role: Role) -> Caller:
        caller = caller_of(context)
        check_caller(caller, self._authority.run_id, self._clock(), {role})
        return caller

    def _request(self, data: bytes) -> Any:
        try:
            request = message_class("EnrolRequest").FromString(data)
        except DecodeError:
            raise RefusedError("The request is not an EnrolRequest.") from None
        if request.protocol != PROTOCOL_VERSION:
            raise RefusedError(
                f"The peer speaks protocol version {request.protocol}, and the run speaks version {PROTOCOL_VERSION}.",
                meaning="They would misunderstand each other.",
                remedy="Install the version of swarm that the bootstrap has.",
            )
        if request.run_id != self._authority.run_id:
            raise RefusedError(
                f"The peer wants to join run {request.run_id}, and this is run {self._authority.run_id}."
            )
        ahead_s = request.wall_s - self._clock()
        # The request was some time on its way, so only a clock that is ahead shows in small offsets.
        if not -MAX_TRANSIT_S <= ahead_s <= MAX_CLOCK_SKEW_S:
            raise clock_skew(ahead_s)
        return request

    def _reply(self, request: Any) -> bytes:
        now_s = self._clock()
        pem = self._authority.issue(request.csr, role=Role.PEER, lifetime_s=self._lifetime_s, now_s=now_s)
        certificate = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
        return (
            message_class("EnrolReply")(
                certificate=certificate,
                spec=self._spec_json,
                wall_s=now_s,
                dht_addresses=list(self._dht_addresses()),
                coordinator_id=self._coordinator_id,
            )
        ).SerializeToString()


async def enrol(
    invitation: Invitation,
    identity: Identity,
    *,
    state_dir: Path | None = None,
    clock: Callable[[], float] = time.time,
    deadline_s: float = DEADLINE_S,
) -> Enrolment:
    """Become a peer of the run, or stay one.

    With a ``state_dir`` the enrolment is kept there, and later renewals too. A peer found enrolled there only renews,
    which needs no use of the invitation and not even a valid one; if no bootstrap answers, what is kept is returned.

    Args:
        clock: seconds since the epoch.
        deadline_s: for all addresses together.

    Raises:
        InvitationError: the invitation is expired, used up, revoked or of another run.
        ClockSkewError: clocks are more than 2 s apart; says by how much.
        RefusedError: another protocol version, or a RunSpec that is not the run's.
        UnreachableError: no bootstrap answers.
    """
    kept = None if state_dir is None else load_enrolment(state_dir, identity, now_s=clock())
    if kept is not None and kept.credentials.authority_pem != invitation.authority_pem:
        kept = None
    enrolment = None
    if kept is not None:
        try:
            addresses = (*kept.bootstrap_addresses, *invitation.addresses)
            enrolment = await _ask("Renew", kept.credentials, addresses, identity, clock, deadline_s)
        except UnreachableError as error:
            log.warning("%s Going on with the certificate of before.", error.what)
            enrolment = kept
        except ClockSkewError:
            raise
        except RefusedError as error:
            log.warning("%s Enrolling anew.", error.what)
    if enrolment is None:
        invitation.check_not_expired(clock())
        enrolment = await _ask("Enrol", invitation.credentials(), invitation.addresses, identity, clock, deadline_s)
    if state_dir is not None:
        _keep(state_dir, enrolment)
    return enrolment


def load_enrolment(state_dir: Path, identity: Identity, *, now_s: float) -> Enrolment | None:
    """The enrolment of ``identity`` kept in ``state_dir``, if its certificate is still valid.

    Raises:
        UsageError: the file may be read by other users, or not by this one.
    """
    data = read_private(Path(state_dir) / ENROLMENT_FILE)
    if data is None:
        return None
    try:
        kept = json.loads(data)
        spec = RunSpec.from_json(kept["spec"])
        credentials = Credentials(
            spec.run_id,
            identity.peer_id,
            Role.PEER,
            identity.key_pem,
            kept["certificate"].encode(),
            kept["authority"].encode(),
        )
        dht_addresses, bootstrap_addresses = tuple(kept["dht_addresses"]), tuple(kept["bootstrap_addresses"])
        enrolment = Enrolment(credentials, spec, dht_addresses, kept["coordinator_id"], bootstrap_addresses)
    except (ValueError, KeyError, TypeError, AttributeError, SwarmError):
        log.warning("The enrolment in %s cannot be used; enrolling anew.", state_dir)
        return None
    return enrolment if now_s < credentials.expires_at_s and bootstrap_addresses else None


async def keep_renewed(
    credentials: Credentials,
    identity: Identity,
    addresses: Callable[[], Iterable[str]],
    *,
    clock: Callable[[], float] = time.time,
    sleep: Sleep = asyncio.sleep,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Renew a peer's certificate whenever two thirds of its life are over; runs until cancelled.

    Args:
        addresses: where bootstraps listen, host:port; asked at each renewal.

    Raises:
        UnreachableError: the certificate has expired because no bootstrap answered.
        RefusedError: it has expired because they refused.
    """
    retry_s = FIRST_RETRY_S
    reason: SwarmError | None = None
    while True:
        await _until_due(credentials, clock, sleep)
        if reason is not None and clock() >= credentials.expires_at_s:
            kind = RefusedError if isinstance(reason, RefusedError) else UnreachableError
            raise kind(
                f"The certificate of this peer expired at {instant(credentials.expires_at_s)}, and could not be "
                f"renewed: {reason.what}",
                meaning="Other peers do not accept this one any more.",
                remedy="Start it again with a fresh invitation; it goes on from its last checkpoint.",
            )
        try:
            grant = await request_certificate("Renew", credentials, addresses(), identity, clock, deadline_s)
            credentials.renewed(grant.certificate_pem)
            retry_s, reason = FIRST_RETRY_S, None
        except SwarmError as error:
            reason = error
            log.warning("The certificate could not be renewed, next attempt in %.0f s: %s", retry_s, error.what)
            await sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)


async def keep_issued(
    credentials: Credentials,
    authority: RunAuthority,
    identity: Identity,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """The same for whoever holds the authority: issues its own certificates; runs until cancelled."""
    while True:
        await _until_due(credentials, clock, sleep)
        lifetime_s = credentials.lifetime_s
        credentials.renewed(
            authority.issue(identity.csr(), role=credentials.role, lifetime_s=lifetime_s, now_s=clock())
        )


async def _until_due(credentials: Credentials, clock: Callable[[], float], sleep: Sleep) -> None:
    while (left_s := credentials.expires_at_s - (1 - RENEW_AT) * credentials.lifetime_s - clock()) > 0:
        await sleep(min(left_s, LOOK_AGAIN_S))


async def _ask(
    method: str,
    shown: Credentials,
    addresses: tuple[str, ...],
    identity: Identity,
    clock: Callable[[], float],
    deadline_s: float,
) -> Enrolment:
    grant = await request_certificate(method, shown, addresses, identity, clock, deadline_s)
    return Enrolment(
        credentials=Credentials(
            shown.run_id, identity.peer_id, Role.PEER, identity.key_pem, grant.certificate_pem, shown.authority_pem
        ),
        spec=_spec_of(grant.spec_json, shown.run_id, grant.address),
        dht_addresses=grant.dht_addresses,
        coordinator_id=grant.coordinator_id,
        bootstrap_addresses=tuple(dict.fromkeys((grant.address, *addresses))),
    )


def _spec_of(text: str, run_id: str, answered: str) -> RunSpec:
    # The hash of the text first: of another run's spec not even the syntax matters.
    if hashlib.sha256(text.encode()).hexdigest()[: len(run_id)] == run_id:
        with contextlib.suppress(ValueError):
            spec = RunSpec.from_json(text)
            if spec.run_id == run_id:
                return spec
    raise RefusedError(
        f"The RunSpec that the bootstrap at {answered} sent is not that of run {run_id}.",
        meaning="The hash of a spec is the id of its run, and these differ: this bootstrap is not to be trusted.",
        remedy="Ask whoever runs it.",
    )


def _keep(state_dir: Path, enrolment: Enrolment) -> None:
    path, credentials = Path(state_dir) / ENROLMENT_FILE, enrolment.credentials

    def write() -> None:
        kept = {
            "spec": enrolment.spec.canonical_json(),
            "certificate": credentials.certificate_pem.decode(),
            "authority": credentials.authority_pem.decode(),
            "dht_addresses": enrolment.dht_addresses,
            "coordinator_id": enrolment.coordinator_id,
            "bootstrap_addresses": enrolment.bootstrap_addresses,
        }
        write_private(path, json.dumps(kept).encode())

    def write_renewed() -> None:
        with contextlib.suppress(SwarmError):  # a full disk must not stop training; the next start enrols anew
            write()

    write()
    credentials.on_renewed(write_renewed)
