"""Records of the directory: who a peer is and where it can be reached, signed and bound to its certificate.

On the DHT a record is the msgpack list [data, signature, certificate]; ``data`` names the key it is stored under, so a
record cannot be moved to another. Every node checks what it is asked to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from swarm.errors import RefusedError

MAX_RECORD_BYTES = 4096
"""Of one sealed record; larger ones are refused before they are parsed."""

MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 300


class RecordSeal(Protocol):
    """Signs with the key of this peer's certificate."""

    @property
    def certificate_der(self) -> bytes: ...

    def sign(self, data: bytes) -> bytes: ...


class Signer(Protocol):
    """Whom a certificate names."""

    @property
    def peer_id(self) -> str: ...

    @property
    def role(self) -> str: ...


Verify = Callable[[bytes, bytes, bytes], Signer]
"""(data, signature, certificate) to the signer; raises RefusedError."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A peer of a run."""

    run_id: str
    peer_id: str
    stage: int | None
    """None for a peer that hosts no stage (the bootstrap)."""
    role: str
    """``peer`` or ``coordinator``."""
    addresses: tuple[str, ...]
    """host:port, in the order to try."""
    lifetime_s: float
    """How long the record lives after each publication."""

    def keys(self) -> list[str]:
        """The DHT keys that it is stored under."""
        keys = [peer_key(self.run_id, self.peer_id)]
        if self.stage is not None:
            keys.append(stage_key(self.run_id, self.stage))
        if self.role == "coordinator":
            keys.append(coordinator_key(self.run_id))
        return keys


def peer_key(run_id: str, peer_id: str) -> str:
    return f"{run_id}/peer/{peer_id}"


def stage_key(run_id: str, stage: int) -> str:
    return f"{run_id}/stage/{stage}"


def coordinator_key(run_id: str) -> str:
    return f"{run_id}/coordinator"


def seal_record(record: PeerRecord, key: str, expires_at_s: float, seal: RecordSeal) -> bytes:
    """The sealed bytes of ``record`` for ``key``."""
    data: bytes = msgpack.packb(
        [key, record.run_id, record.peer_id, record.stage, record.role, list(record.addresses), expires_at_s]
    )
    sealed: bytes = msgpack.packb([data, seal.sign(data), seal.certificate_der])
    if len(sealed) > MAX_RECORD_BYTES:
        raise RefusedError(
            f"The directory entry of this peer has {len(sealed)} bytes, more than {MAX_RECORD_BYTES}.",
            meaning="Others could not find this peer.",
            remedy="Announce fewer addresses.",
        )
    return sealed


def open_record(sealed: bytes, verify: Verify) -> tuple[str, PeerRecord, float]:
    """Check a sealed record; returns its key, what it says and when it expires.

    Raises:
        RefusedError: too large, malformed, not signed by the peer it names, or in a role that its signer does not have.
    """
    if len(sealed) > MAX_RECORD_BYTES:
        raise RefusedError(f"A record has {len(sealed)} bytes, more than {MAX_RECORD_BYTES}.")
    try:
        data, signature, certificate = _unpack(sealed)
        key, run_id, peer_id, stage, role, addresses, expires_at_s = _unpack(data)
        record = PeerRecord(
            _text(run_id),
            _text(peer_id),
            None if stage is None else int(stage),
            _text(role),
            tuple(_text(address, MAX_ADDRESS_CHARACTERS) for address in addresses[: MAX_ADDRESSES + 1]),
            0.0,
        )
        expires_at_s = float(expires_at_s)
        key = _text(key)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RefusedError(f"A record cannot be read: {error}.") from None
    if len(record.addresses) > MAX_ADDRESSES:
        raise RefusedError(f"A record has more than {MAX_ADDRESSES} addresses.")
    signer = verify(bytes(data), bytes(signature), bytes(certificate))
    if signer.peer_id != record.peer_id:
        raise RefusedError(f"A record of {record.peer_id} is signed by {signer.peer_id}.")
    if record.role == "coordinator" and str(signer.role) != "bootstrap":
        raise RefusedError(f"{record.peer_id} announces itself as coordinator with a certificate of role {signer.role}.")
    if key not in record.keys():
        raise RefusedError(f"A record of {record.peer_id} is for the key {key}, which is not one of its own.")
    return key, record, expires_at_s


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data)


def _text(value: object, limit: int = 128) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError("a field is not a short text")
    return value
