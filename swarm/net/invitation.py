"""Invitations: one line of text that lets a stranger enrol, and the bootstrap's book of who used which.

An invitation carries a certificate of role ``invitation`` with its key, so that even enrolling is a call of a certified
caller. Whoever has the text can enrol as often as it has uses: treat it like a password.

The text is ``swarm1.`` and base64url of a signature (64 bytes) and the deflated ``InvitationBody``. The run's authority
signs the deflated bytes, so an alteration of any character is noticed.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from google.protobuf.message import DecodeError

from swarm.errors import InvitationError, RefusedError, SwarmError, UsageError
from swarm.net.addresses import MAX_ADDRESSES, parse_address
from swarm.net.authority import BOOTSTRAP_NAME, Role, RunAuthority
from swarm.net.credentials import Credentials, instant
from swarm.net.identity import MALFORMED, SIGNATURE, Identity, common_name
from swarm.net.messages import message_class
from swarm.net.private import locked, read_private, write_private

PREFIX = "swarm1."
CONTEXT = b"swarm invitation v1\0"
"""Precedes what the authority signs for an invitation."""

MAX_TEXT_CHARACTERS = 16_384
MAX_BODY_BYTES = 16_384
MAX_USES = 10_000
MAX_INVITATIONS = 1000
"""Invitations that a book remembers; the first to expire are forgotten first."""

BOOK_FILE = "invitations.json"
_NUMBER_BYTES = 32


@dataclass(frozen=True)
class Invitation:
    """What a stranger needs to enrol in a run."""

    run_id: str
    addresses: tuple[str, ...]
    """Where bootstraps of the run listen, host:port."""
    uses: int
    """Peers that may enrol with it."""
    expires_at_s: int
    """Seconds since the epoch."""
    identity: Identity
    certificate: bytes = field(repr=False)
    """Of role invitation, DER."""
    authority: bytes = field(repr=False)
    """Certificate of the run's authority, DER."""
    text: str = field(repr=False, default="")

    @classmethod
    def create(
        cls,
        authority: RunAuthority,
        addresses: Sequence[str],
        *,
        uses: int,
        lifetime_s: float,
        book: InvitationBook | None = None,
        now_s: float | None = None,
    ) -> Self:
        """A new invitation, entered in ``book``.

        Raises:
            UsageError: no or too many addresses, or not a number of uses or a lifetime.
        """
        if not 1 <= len(addresses) <= MAX_ADDRESSES:
            raise UsageError(f"An invitation has 1 to {MAX_ADDRESSES} addresses, not {len(addresses)}.")
        if not 1 <= uses <= MAX_USES:
            raise UsageError(f"An invitation has 1 to {MAX_USES} uses, not {uses}.")
        if not lifetime_s >= 1:
            raise UsageError(f"An invitation lasts at least a second, not {lifetime_s:g}.")
        now_s = time.time() if now_s is None else now_s
        identity = Identity.create()
        pem = authority.issue(identity.csr(), role=Role.INVITATION, lifetime_s=lifetime_s, now_s=now_s)
        certificate = x509.load_pem_x509_certificate(pem)
        invitation = cls(
            run_id=authority.run_id,
            addresses=tuple(str(parse_address(address)) for address in addresses),
            uses=uses,
            expires_at_s=int(certificate.not_valid_after_utc.timestamp()),
            identity=identity,
            certificate=certificate.public_bytes(serialization.Encoding.DER),
            authority=authority.der,
        )
        if book is not None:
            book.enter(invitation)
        return replace(invitation, text=_encode(invitation, authority))

    def encode(self) -> str:
        """The invitation as one line of URL-safe text. A secret."""
        return self.text

    @classmethod
    def parse(cls, source: str | Path, *, now_s: float | None = None, accept_expired: bool = False) -> Self:
        """Read an invitation: its text, the path of a file with it, or ``-`` for standard input.

        Args:
            accept_expired: for a peer that may be enrolled already (:func:`swarm.net.enrolment.enrol` checks again).

        Raises:
            InvitationError: not an invitation, altered, truncated, or expired (says when).
        """
        invitation = _decode(cls, _read(source))
        if not accept_expired:
            invitation.check_not_expired(time.time() if now_s is None else now_s)
        return invitation

    def check_not_expired(self, now_s: float) -> None:
        """Refuse an invitation that has expired.

        Raises:
            InvitationError: says when.
        """
        if now_s >= self.expires_at_s:
            raise InvitationError(
                f"The invitation expired at {instant(self.expires_at_s)}; the clock of this machine says "
                f"{instant(now_s)}.",
                meaning="It cannot be used to enrol any more.",
                remedy="Ask whoever runs the bootstrap for a fresh one; check the clock.",
            )

    @property
    def invitation_id(self) -> str:
        """The peer id of its key."""
        return self.identity.peer_id

    @property
    def bootstrap_id(self) -> str:
        """What to expect as the peer id of the bootstrap: a name that every bootstrap's certificate has."""
        return BOOTSTRAP_NAME

    @property
    def authority_pem(self) -> bytes:
        """Certificate of the run's authority."""
        return _pem(self.authority)

    def credentials(self) -> Credentials:
        """What to call the bootstrap with."""
        return Credentials(
            self.run_id,
            self.invitation_id,
            Role.INVITATION,
            self.identity.key_pem,
            _pem(self.certificate),
            self.authority_pem,
        )


class InvitationBook:
    """Which peers enrolled with which invitation, kept in a state directory.

    Each change is on disk before the method returns, and each method looks at the disk first: another process may enter
    or revoke invitations while a bootstrap runs. All methods block for a write to disk; call them in a thread.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = Path(state_dir) / BOOK_FILE
        self._lock = threading.Lock()

    def enter(self, invitation: Invitation) -> None:
        """Make an invitation usable."""
        with self._lock, locked(self._path):
            pages = self._read()
            pages[invitation.invitation_id] = {
                "expires_at_s": invitation.expires_at_s,
                "uses": invitation.uses,
                "peers": [],
                "revoked": False,
            }
            # Old ones are kept, to tell their users that they have expired, as long as there is room.
            for extra in sorted(pages, key=lambda key: pages[key]["expires_at_s"])[: len(pages) - MAX_INVITATIONS]:
                del pages[extra]
            self._write(pages)

    def revoke(self, invitation_id: str) -> None:
        """End an invitation, and the renewals of the peers that came with it.

        Raises:
            UsageError: there is no such invitation.
        """
        with self._lock, locked(self._path):
            pages = self._read()
            if invitation_id not in pages:
                raise UsageError(f"There is no invitation {invitation_id}.")
            pages[invitation_id]["revoked"] = True
            self._write(pages)

    def redeem(self, invitation_id: str, peer_id: str, *, now_s: float | None = None) -> int:
        """Count ``peer_id`` as enrolled with an invitation, once however often it enrols. Returns the uses left.

        Raises:
            InvitationError: unknown, revoked, expired, or used up by other peers.
        """
        now_s = time.time() if now_s is None else now_s
        with self._lock, locked(self._path):
            pages = self._read()
            page = pages.get(invitation_id)
            if page is None:
                raise _refusal("is not known to this bootstrap")
            if page["revoked"]:
                raise _refusal("was revoked")
            if now_s >= page["expires_at_s"]:
                raise _refusal(f"expired at {instant(page['expires_at_s'])}, by the clock of the bootstrap")
            if peer_id not in page["peers"]:
                if len(page["peers"]) >= page["uses"]:
                    raise _refusal(f"is used up: {page['uses']} of {page['uses']} peers have enrolled with it")
                page["peers"].append(peer_id)
                self._write(pages)
            return page["uses"] - len(page["peers"])

    def check_renewable(self, peer_id: str) -> None:
        """Refuse a peer all of whose invitations were revoked; peers that no page names may renew.

        Raises:
            InvitationError: says so.
        """
        with self._lock:
            pages = [page for page in self._read().values() if peer_id in page["peers"]]
        if pages and all(page["revoked"] for page in pages):
            raise _refusal("with which this peer enrolled was revoked")

    def _read(self) -> dict[str, dict[str, Any]]:
        data = read_private(self._path)
        if data is None:
            return {}
        try:
            pages = json.loads(data)
            for page in pages.values():
                if not isinstance(page["peers"], list) or page["uses"] < 1 or page["expires_at_s"] < 0:
                    raise ValueError(page)
                page["revoked"] = bool(page["revoked"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{self._path} is damaged.",
                meaning="It is not known which invitations are used up, so nobody can enrol.",
                remedy="Put it back, or delete it and issue new invitations.",
            ) from None
        return pages

    def _write(self, pages: dict[str, dict[str, Any]]) -> None:
        write_private(self._path, json.dumps(pages).encode())


def _encode(invitation: Invitation, authority: RunAuthority) -> str:
    body = message_class("InvitationBody")(
        run_id=invitation.run_id,
        addresses=invitation.addresses,
        uses=invitation.uses,
        expires_at_s=invitation.expires_at_s,
        key=invitation.identity.key.private_numbers().private_value.to_bytes(_NUMBER_BYTES, "big"),
        certificate=invitation.certificate,
        authority=invitation.authority,
    )
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    packed = deflate.compress(body.SerializeToString()) + deflate.flush()
    numbers = utils.decode_dss_signature(authority.identity.sign(CONTEXT + packed))
    signature = b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers)
    return PREFIX + base64.urlsafe_b64encode(signature + packed).decode().rstrip("=")


def _decode(kind: type[Invitation], text: str) -> Any:
    encoded = text.removeprefix(PREFIX)
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        if base64.urlsafe_b64encode(data).decode().rstrip("=") != encoded:
            raise ValueError("bits after the end")
        signature, packed = data[: 2 * _NUMBER_BYTES], data[2 * _NUMBER_BYTES :]
        inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
        plain = inflate.decompress(packed, MAX_BODY_BYTES)
        if not inflate.eof or inflate.unused_data:
            raise ValueError("not deflated as a whole")
        body = message_class("InvitationBody").FromString(plain)
        authority = x509.load_der_x509_certificate(body.authority)
        key = authority.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or authority.subject != common_name(body.run_id):
            raise ValueError("not an authority of the run")
        numbers = (int.from_bytes(signature[at : at + _NUMBER_BYTES], "big") for at in (0, _NUMBER_BYTES))
        key.verify(utils.encode_dss_signature(*numbers), CONTEXT + packed, SIGNATURE)
        invitation = kind(
            run_id=body.run_id,
            addresses=tuple(str(parse_address(address)) for address in body.addresses),
            uses=body.uses,
            expires_at_s=body.expires_at_s,
            identity=Identity(ec.derive_private_key(int.from_bytes(body.key, "big"), ec.SECP256R1())),
            certificate=body.certificate,
            authority=body.authority,
            text=text,
        )
        invitation.credentials()
    except (*MALFORMED, zlib.error, DecodeError, SwarmError):
        raise _altered() from None
    if not invitation.addresses:
        raise _altered()
    return invitation


def _read(source: str | Path) -> str:
    text = str(source).strip()
    if not text.startswith(PREFIX):
        try:
            if text == "-":
                text = sys.stdin.read(MAX_TEXT_CHARACTERS + 1)
            else:
                with Path(text).expanduser().open(encoding="utf-8") as file:
                    text = file.read(MAX_TEXT_CHARACTERS + 1)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            shown = text if len(text) <= 100 else f"{text[:100]}..."
            raise InvitationError(
                f"{shown!r} is no invitation, and no file with one can be read there: {reason}.",
                remedy=f"An invitation starts with {PREFIX}; swarm-bootstrap prints it.",
            ) from None
    text = "".join(text.split())  # mail and chat programs break long lines
    if not text.startswith(PREFIX):
        raise InvitationError(f"What was given is no invitation: it does not start with {PREFIX}.")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InvitationError(f"What was given is no invitation: it is longer than {MAX_TEXT_CHARACTERS} characters.")
    return text


def _pem(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)


def _altered() -> InvitationError:
    return InvitationError(
        "The invitation was altered or cut short.",
        meaning="It cannot be used.",
        remedy="Copy it again, as a whole, from where it was issued.",
    )


def _refusal(reason: str) -> RefusedError:
    return InvitationError(f"The invitation {reason}.", remedy="Ask whoever runs the bootstrap for a fresh one.")
