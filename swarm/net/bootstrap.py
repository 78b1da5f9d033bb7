"""Calls to the bootstraps of a run, address after address, and what it means when none answers as it should.

gRPC reports a wrong certificate, a closed port and a server of another run alike. Where it fails, a bare TLS handshake
finds out which it was.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf.message import DecodeError

from swarm.core.frame import PROTOCOL_VERSION
from swarm.errors import ClockSkewError, InvitationError, RefusedError, SwarmError, UnreachableError
from swarm.net.addresses import parse_address
from swarm.net.authority import BOOTSTRAP_NAME, Role, server_name
from swarm.net.channel import FAULT_KEY, failure, open_channel
from swarm.net.credentials import Credentials, instant
from swarm.net.identity import MALFORMED, Identity
from swarm.net.messages import message_class

SERVICE = "swarm.v1.Enrolment"

MAX_CLOCK_SKEW_S = 2.0
"""Clocks further apart than this are refused; the DHT refuses records from 3 s on, without saying why."""

DEADLINE_S = 30.0
"""For all addresses together."""

LEAST_SHARE_S = 1.0
RETRY_S = 0.2

_NO_CONNECTION = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)
_NOT_YET_VALID, _EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED


async def call_bootstrap(
    addresses: Iterable[str], credentials: Credentials, method: str, request: bytes, *, deadline_s: float = DEADLINE_S
) -> tuple[bytes, str]:
    """Call ``method`` at the first of ``addresses`` (host:port) where a bootstrap of the run answers.

    Returns:
        The reply, and the address it came from.

    Raises:
        SwarmError: the error that a bootstrap answered with.
        InvitationError: what answers is of another run, or does not accept the invitation's certificate.
        RefusedError: it does not accept the peer's certificate.
        UnreachableError: nothing answers; names all addresses.
    """
    rest = list(dict.fromkeys(addresses))
    ends_s = time.monotonic() + deadline_s
    failures: list[tuple[str, SwarmError]] = []
    while rest:
        share_s = max((ends_s - time.monotonic()) / len(rest), LEAST_SHARE_S)
        address = rest.pop(0)
        try:
            return await _call(address, credentials, method, request, share_s), address
        except _NoAnswer as answer:
            failures.append((address, answer.error))
    for _, error in failures:
        if isinstance(error, RefusedError):
            raise error
    raise UnreachableError(
        "No bootstrap of the run answers: "
        + ("; ".join(f"{address}: {error.what}" for address, error in failures) or "no address is known")
        + ".",
        meaning="This peer cannot enrol or renew its certificate.",
        remedy="Check that swarm-bootstrap runs, and that its address and port can be reached from here.",
    )


@dataclass(frozen=True, slots=True)
class Grant:
    """A certificate, and what the bootstrap at ``address`` said with it."""

    certificate_pem: bytes
    spec_json: str
    dht_addresses: tuple[str, ...]
    coordinator_id: str
    address: str


async def request_certificate(
    method: str,
    shown: Credentials,
    addresses: Iterable[str],
    identity: Identity,
    clock: Callable[[], float],
    deadline_s: float,
) -> Grant:
    """Call ``Enrol`` or ``Renew``; the certificate and the spec are not checked here.

    Raises:
        ClockSkewError: the clocks are too far apart.
        SwarmError: as :func:`call_bootstrap`.
    """
    asked_s = clock()
    request = message_class("EnrolRequest")(
        csr=identity.csr(), run_id=shown.run_id, protocol=PROTOCOL_VERSION, wall_s=asked_s
    )
    data, address = await call_bootstrap(
        addresses, shown, f"/{SERVICE}/{method}", request.SerializeToString(), deadline_s=deadline_s
    )
    got_s = clock()
    try:
        reply = message_class("EnrolReply").FromString(data)
        pem = x509.load_der_x509_certificate(reply.certificate).public_bytes(serialization.Encoding.PEM)
    except (DecodeError, *MALFORMED):
        raise RefusedError(f"What the bootstrap at {address} answered cannot be read.") from None
    # The bootstrap read its clock at some moment in between.
    if reply.wall_s < asked_s - MAX_CLOCK_SKEW_S:
        raise clock_skew(asked_s - reply.wall_s)
    if reply.wall_s > got_s + MAX_CLOCK_SKEW_S:
        raise clock_skew(got_s - reply.wall_s)
    return Grant(pem, reply.spec, tuple(reply.dht_addresses), reply.coordinator_id, address)


def clock_skew(ahead_s: float) -> ClockSkewError:
    """The clock of a peer is ``ahead_s`` seconds ahead of that of the bootstrap (negative: behind)."""
    return ClockSkewError(
        f"The clock of this peer is off by {ahead_s:+.1f} s from that of the bootstrap "
        f"({'ahead' if ahead_s > 0 else 'behind'}); {MAX_CLOCK_SKEW_S:g} s are allowed.",
        meaning="The DHT does not accept records of a peer whose clock is off.",
        remedy="Set the clock, for instance with NTP, and try again.",
    )


class _NoAnswer(Exception):
    """No bootstrap of the run answered at this address; another address may do better."""

    def __init__(self, error: SwarmError) -> None:
        super().__init__(error.what)
        self.error = error


async def _call(address: str, credentials: Credentials, method: str, request: bytes, share_s: float) -> bytes:
    ends_s = time.monotonic() + share_s
    while True:
        channel = open_channel(address, credentials, BOOTSTRAP_NAME, "call")
        try:
            return await channel.unary_unary(method)(request, timeout=max(ends_s - time.monotonic(), 0.1))
        except grpc.aio.AioRpcError as error:
            answered = any(key == FAULT_KEY for key, _ in error.trailing_metadata() or ())
            if answered or error.code() not in _NO_CONNECTION:
                raise failure(error, f"the bootstrap at {address}") from None
            details = error.details() or ""
        finally:
            await channel.close()
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise _NoAnswer(UnreachableError(f"no answer within {share_s:.1f} s"))
        await _check_server(address, credentials, left_s, share_s)
        # The server is the right one. If it hung up, it did not accept the certificate shown to it.
        if "Socket closed" in details:
            raise _NoAnswer(_not_accepted(address, credentials))
        await asyncio.sleep(min(RETRY_S, left_s))


async def _check_server(address: str, credentials: Credentials, timeout_s: float, share_s: float) -> None:
    """Raise _NoAnswer unless a bootstrap of the run listens there."""
    where = parse_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.authority_pem.decode())
    context.set_alpn_protocols(["h2"])
    name = server_name(BOOTSTRAP_NAME, credentials.run_id)
    try:
        async with asyncio.timeout(timeout_s):
            # No happy_eyeballs_delay: uvloop does not know it.
            _, writer = await asyncio.open_connection(where.host, where.port, ssl=context, server_hostname=name)
            writer.close()
    except TimeoutError:
        raise _NoAnswer(UnreachableError(f"no answer within {share_s:.1f} s")) from None
    except ssl.SSLCertVerificationError as error:
        raise _NoAnswer(_foreign(address, credentials, error)) from None
    except ssl.SSLError:
        raise _NoAnswer(UnreachableError("what listens there does not speak TLS")) from None
    except OSError as error:
        raise _NoAnswer(UnreachableError(error.strerror or str(error))) from None


def _foreign(address: str, credentials: Credentials, error: ssl.SSLCertVerificationError) -> SwarmError:
    if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        # Certificates are backdated: one that is not valid yet shows a wrong clock, one that has expired only might.
        kind = ClockSkewError if error.verify_code == _NOT_YET_VALID else RefusedError
        return kind(
            f"The certificate of the bootstrap at {address} is not valid now, {instant(time.time())} by the clock "
            f"of this machine ({error.verify_message}).",
            meaning="This peer cannot tell whether it is the right one.",
            remedy="Check the clock of this machine. If it is right, restart the bootstrap.",
        )
    return InvitationError(
        f"What listens at {address} is not a bootstrap of run {credentials.run_id} ({error.verify_message}).",
        meaning="It belongs to another run, or its run was started anew with another state directory.",
        remedy="Ask for an invitation of the run that is there now.",
    )


def _not_accepted(address: str, credentials: Credentials) -> SwarmError:
    if credentials.role is Role.INVITATION:
        return InvitationError(
            f"The bootstrap at {address} does not accept the invitation, which is valid until "
            f"{instant(credentials.expires_at_s)}.",
            meaning="By the clock of the bootstrap it may have expired already.",
            remedy="Check the clock of this machine, and ask for a fresh invitation.",
        )
    return RefusedError(
        f"The bootstrap at {address} does not accept the certificate of this peer, which is valid until "
        f"{instant(credentials.expires_at_s)}.",
        meaning="By the clock of the bootstrap it may have expired already.",
        remedy="Check the clock of this machine, and enrol again with a fresh invitation.",
    )
