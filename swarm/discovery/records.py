"""Records of the directory: who a peer is and where it can be reached, signed and bound to its certificate.

On the DHT a record is the msgpack list [data, signature, certificate]; ``data`` names the key it is stored under and
the digest of the certificate, so neither can be exchanged. Every node checks what it is asked to keep and is given.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from swarm.errors import RefusedError

MAX_RECORD_BYTES = 4096
"""Of one sealed record; larger ones are refused before they are parsed."""

MAX_ADDRESSES = 16
MAX_ADDRESS_CHARACTERS = 300
MAX_TEXT_CHARACTERS = 128
MAX_STAGE = 65_535

MAX_LIFETIME_S = 3600.0
"""No record lives longer from one publication, so the directory forgets everybody within an hour."""

CLOCK_SLACK_S = 5.0
"""Above the 3 s by which hivemind lets clocks differ. A record ends this long before its certificate: one that outlived
it, if only by somebody's clock, would make the others under its key look bad too."""

MAX_REMEMBERED = 4096
"""Records known to be good; each node of the DHT returns the same ones again and again."""


class RecordSeal(Protocol):
    """Signs with the key of this peer's certificate."""

    @property
    def certificate_der(self) -> bytes: ...

    @property
    def expires_at_s(self) -> float:
        """End of the certificate, seconds since the epoch."""
        ...

    def sign(self, data: bytes) -> bytes: ...


class Signer(Protocol):
    """Whom a certificate names."""

    @property
    def peer_id(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def expires_at_s(self) -> float: ...


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
    """How long the record lives after each publication; 0 in a record that was found."""
    withdrawn: bool = False
    """The peer has left: takes the place of its last record until that would have expired, and is never found."""
    expires_at_s: float = 0.0
    """When a record that was found ends, seconds since the epoch."""

    def dht_keys(self) -> list[str]:
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
    """The sealed bytes of ``record`` for ``key``.

    Raises:
        RefusedError: others would refuse it, since it is too large.
    """
    fields = [record.run_id, record.peer_id, record.stage, record.role, list(record.addresses), record.withdrawn]
    data = _pack([_digest(seal.certificate_der), key, expires_at_s, *fields])
    sealed = _pack([data, seal.sign(data), seal.certificate_der])
    if len(sealed) > MAX_RECORD_BYTES or len(record.addresses) > MAX_ADDRESSES:
        raise RefusedError(
            f"The directory entry of this peer has {len(record.addresses)} addresses and {len(sealed)} bytes, "
            f"more than {MAX_ADDRESSES} or {MAX_RECORD_BYTES}.",
            meaning="Others could not find this peer.",
            remedy="Announce fewer addresses.",
        )
    return sealed


def open_record(sealed: bytes, verify: Verify) -> tuple[str, PeerRecord]:
    """Check a sealed record; returns its key and what it says. Whether it has expired is left to the caller.

    Raises:
        RefusedError: too large, malformed, not signed by the peer it names, outliving the certificate, for a key that
            is not its own, or in a role that its signer does not have.
    """
    if len(sealed) > MAX_RECORD_BYTES:
        raise RefusedError(f"A record has {len(sealed)} bytes, more than {MAX_RECORD_BYTES}.")
    try:
        data, signature, certificate = (_bytes(part) for part in msgpack.unpackb(sealed))
        bound_to, key, record = _parse(data)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise RefusedError(f"A record cannot be read: {error}.") from None
    if bound_to != _digest(certificate):
        # The encoding of a certificate has bits that its own signature does not cover.
        raise RefusedError(f"A record of {record.peer_id} comes with another certificate than it was signed for.")
    signer = verify(data, signature, certificate)
    if signer.peer_id != record.peer_id:
        raise RefusedError(f"A record of {record.peer_id} is signed by {signer.peer_id}.")
    if record.expires_at_s > signer.expires_at_s:
        raise RefusedError(f"A record of {record.peer_id} outlives the certificate that it is signed with.")
    if record.role == "coordinator" and str(signer.role) != "bootstrap":
        raise RefusedError(
            f"{record.peer_id} announces itself as coordinator with a certificate of role {signer.role}."
        )
    if key not in record.dht_keys():
        raise RefusedError(f"A record of {record.peer_id} is for the key {key}, which is not one of its own.")
    return key, record


class RecordCheck:
    """Opens the records of one run, and remembers the good ones, since checking a signature takes its time."""

    def __init__(self, run_id: str, verify: Verify) -> None:
        self._run_id = run_id
        self._verify = verify
        self._good: OrderedDict[bytes, tuple[str, PeerRecord]] = OrderedDict()

    def open(self, sealed: object) -> tuple[str, PeerRecord]:
        """As :func:`open_record`, of this run only and with an end that is not too far away.

        Raises:
            RefusedError: as there.
        """
        if not isinstance(sealed, bytes) or len(sealed) > MAX_RECORD_BYTES:
            raise RefusedError(f"A record is not bytes, or more than {MAX_RECORD_BYTES} of them.")
        digest = _digest(sealed)
        known = self._good.get(digest)
        if known is not None:
            self._good.move_to_end(digest)
            return known
        key, record = open_record(sealed, self._verify)
        if record.run_id != self._run_id:
            raise RefusedError(f"A record of {record.peer_id} is for run {record.run_id}.")
        if record.expires_at_s > time.time() + MAX_LIFETIME_S + CLOCK_SLACK_S:
            raise RefusedError(f"A record of {record.peer_id} claims more than {MAX_LIFETIME_S:g} s.")
        self._good[digest] = key, record
        if len(self._good) > MAX_REMEMBERED:
            self._good.popitem(last=False)
        return key, record


def _parse(data: bytes) -> tuple[bytes, str, PeerRecord]:
    bound_to, key, expires_at_s, run_id, peer_id, stage, role, addresses, withdrawn = msgpack.unpackb(data)
    if not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
        raise ValueError(f"it does not have a list of at most {MAX_ADDRESSES} addresses")
    if stage is not None and not (type(stage) is int and 0 <= stage <= MAX_STAGE):
        raise ValueError(f"its stage is not in 0..{MAX_STAGE}")
    if type(expires_at_s) is not float or not math.isfinite(expires_at_s) or type(withdrawn) is not bool:
        raise ValueError("its end or its state is of another type")
    record = PeerRecord(
        _text(run_id),
        _text(peer_id),
        stage,
        _text(role),
        tuple(_text(address, MAX_ADDRESS_CHARACTERS) for address in addresses),
        lifetime_s=0.0,
        withdrawn=withdrawn,
        expires_at_s=expires_at_s,
    )
    return _bytes(bound_to), _text(key, 3 * MAX_TEXT_CHARACTERS), record


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _pack(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None  # only a Packer without autoreset returns None
    return packed


def _text(value: Any, limit: int = MAX_TEXT_CHARACTERS) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError("a field is not a short text")
    return value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a part is not bytes")
    return value
