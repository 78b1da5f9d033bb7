"""Channels to other peers: one connection per purpose, and what a failed call means."""

from __future__ import annotations

import time
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from swarm.errors import RefusedError, SwarmError, UnreachableError
from swarm.net.addresses import parse_address
from swarm.net.credentials import Credentials, instant, server_name
from swarm.net.frames import CHUNK_BYTES
from swarm.net.messages import message_class

MAX_MESSAGE_BYTES = CHUNK_BYTES + 64 * 1024
"""Largest gRPC message: a chunk, or a control message of 1 MiB in its envelope."""

CONNECT_DEADLINE_S = 10.0
"""For TCP and TLS handshake together; over a poor link that takes seconds."""

KEEPALIVE_S = 10.0
"""Pause between HTTP/2 pings on a silent connection."""

KEEPALIVE_TIMEOUT_S = 10.0
"""A ping unanswered for this long ends the connection."""

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the published types
"""What reading a stream gives when the other side has finished."""

FAULT_KEY = "swarm-fault-bin"
"""Trailing metadata that carries the error of a refused call."""

_TLS_SIGNS = ("handshake failed", "Verification", "verification", "CERTIFICATE")
"""Words with which gRPC says that one end did not accept the other's certificate."""

MAX_FAULT_CHARACTERS = 1000
"""Longest text of a fault; the metadata of a call is limited to 8 KiB."""


def open_channel(address: str, credentials: Credentials, peer_id: str, purpose: str) -> grpc.aio.Channel:
    """A channel to the server of ``peer_id`` at ``address`` (host:port); connects with the first call.

    Every channel has a connection of its own, so that a small call never queues behind bulk. ``purpose`` is one word
    that tells the connections apart in logs, such as ``link`` or ``session``.

    Raises:
        UsageError: not an address.
        RefusedError: the certificate of this peer has expired (a server would only close the connection).
    """
    where = parse_address(address)
    if time.time() >= credentials.expires_at_s:
        raise RefusedError(
            f"The certificate of this peer expired at {instant(credentials.expires_at_s)}.",
            meaning="Nobody in the run accepts it any more.",
            remedy="Enrol again with a fresh invitation; if it should still be valid, check the clock.",
        )
    options = [
        *common_options(),
        ("grpc.use_local_subchannel_pool", 1),  # else channels with equal arguments share a connection
        ("grpc.ssl_target_name_override", server_name(peer_id, credentials.run_id)),
        ("grpc.primary_user_agent", f"swarm-{purpose}"),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", int(CONNECT_DEADLINE_S * 1000)),  # in spite of its name
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]
    return grpc.aio.secure_channel(str(where), credentials.channel_credentials(), options=options)


def common_options() -> list[tuple[str, int]]:
    """Options of both ends: message sizes and keepalive. BDP probing stays on (the default)."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def encode_fault(error: SwarmError) -> bytes:
    """``error`` as the protobuf message ``Fault``."""
    texts = (error.what, error.meaning, error.remedy)
    what, meaning, remedy = (text[:MAX_FAULT_CHARACTERS] for text in texts)
    return message_class("Fault")(code=error.code, what=what, meaning=meaning, remedy=remedy).SerializeToString()


def decode_fault(data: bytes) -> SwarmError:
    """The inverse of :func:`encode_fault`: the subclass with that code, RefusedError if there is none."""
    try:
        fault = message_class("Fault").FromString(data)
    except DecodeError:
        return RefusedError("The other side refused without a reason that can be read.")
    kind = _kinds().get(fault.code, RefusedError)
    return kind(fault.what, meaning=fault.meaning, remedy=fault.remedy)


def failure(error: grpc.aio.AioRpcError, whom: str) -> SwarmError:
    """What a failed call to ``whom`` (a peer and its address) means.

    Returns the error that the other side gave; else RefusedError when the TLS handshake or the call was refused, and
    UnreachableError in all other cases.
    """
    for key, value in error.trailing_metadata() or ():
        if key == FAULT_KEY:
            return decode_fault(value if isinstance(value, bytes) else value.encode())
    code, details = error.code(), error.details() or ""
    if any(sign in details for sign in _TLS_SIGNS):
        return RefusedError(
            f"{whom} and this peer do not accept each other's certificates ({details}).",
            meaning="It belongs to another run, is somebody else, or one of the certificates has expired.",
            remedy="Enrol again with a fresh invitation; check the clock of this machine.",
        )
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return RefusedError(f"{whom} refused the call: {details}.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(
            f"{whom} does not offer this service.",
            meaning="It is another kind of peer, or runs another version.",
        )
    reason = "no answer in time" if code is grpc.StatusCode.DEADLINE_EXCEEDED else details or code.name.lower()
    return UnreachableError(
        f"Cannot reach {whom}: {reason}.",
        # A server that does not accept a client's certificate just closes the connection.
        meaning="It may not accept the certificate of this peer." if details.endswith("Socket closed") else "",
        remedy="Check that it runs and that its address and port can be reached from here.",
    )


def _kinds() -> dict[str, type[SwarmError]]:
    kinds: dict[str, type[SwarmError]] = {}
    rest: list[type[SwarmError]] = [SwarmError]
    while rest:
        kind = rest.pop()
        kinds.setdefault(kind.code, kind)
        rest += kind.__subclasses__()
    return kinds
