"""What a peer shows to others, and how it learns who they are: certificates of the run in TLS and under records."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.errors import RefusedError
from swarm.net.authority import BACKDATED_S, Role, RunAuthority, server_name
from swarm.net.identity import MALFORMED, SIGNATURE, Identity, peer_id_of

__all__ = [
    "Caller",
    "Credentials",
    "caller_of",
    "check_caller",
    "instant",
    "read_certificate",
    "server_name",
    "verify_signed",
]

RECORD_CONTEXT = b"swarm record v1\0"
"""Precedes what is signed for records, so that such a signature is worth nothing elsewhere."""

MAX_CERTIFICATE_BYTES = 4096
KNOWN_CERTIFICATES = 4096
"""Certificates whose content is remembered."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a certificate names."""

    peer_id: str
    run_id: str
    role: Role
    expires_at_s: float
    """Seconds since the epoch."""


class Credentials:
    """Key, certificate and authority of one member of a run. The certificate is replaced when it is renewed.

    Args:
        key_pem: private key, PKCS #8.
        certificate_pem: certificate of that key, issued by the authority.
        authority_pem: certificate of the run's authority.

    Raises:
        RefusedError: they do not belong together.
    """

    def __init__(
        self, run_id: str, peer_id: str, role: Role, key_pem: bytes, certificate_pem: bytes, authority_pem: bytes
    ) -> None:
        self.run_id = run_id
        self.peer_id = peer_id
        self.role = role
        self.key_pem = key_pem
        self.authority_pem = authority_pem
        self._identity = Identity(_private_key(key_pem))
        self._listeners: list[Callable[[], None]] = []
        self._take(certificate_pem)

    @classmethod
    def issue(
        cls, authority: RunAuthority, identity: Identity, role: Role, lifetime_s: float, *, now_s: float | None = None
    ) -> Self:
        """Credentials of whoever holds the authority."""
        certificate = authority.issue(identity.csr(), role=role, lifetime_s=lifetime_s, now_s=now_s)
        return cls(authority.run_id, identity.peer_id, role, identity.key_pem, certificate, authority.pem)

    @property
    def certificate_pem(self) -> bytes:
        return self._certificate_pem

    @property
    def certificate_der(self) -> bytes:
        """What goes with a signature of :meth:`sign`."""
        return self._certificate_der

    @property
    def expires_at_s(self) -> float:
        """When the certificate ends, seconds since the epoch."""
        return self._expires_at_s

    @property
    def lifetime_s(self) -> float:
        """How long the certificate is valid from the moment it was issued."""
        return self._lifetime_s

    def renewed(self, certificate_pem: bytes) -> None:
        """Use another certificate of the same key from now on, and tell the listeners.

        Servers show it to the next connection; channels that are open go on, but reconnect with the old one: open
        them anew before it expires.

        Raises:
            RefusedError: it is not a certificate for this key, role and run from this authority.
        """
        self._take(certificate_pem)
        for listener in list(self._listeners):
            listener()

    def on_renewed(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each renewal; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client: shows the certificate of now, accepts servers of the run only."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.authority_pem, private_key=self.key_pem, certificate_chain=self.certificate_pem
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server: each connection sees the newest certificate, and must show one of the run."""
        shown = self.certificate_pem

        def newest() -> Any:
            nonlocal shown
            if shown == self.certificate_pem:
                return None
            shown = self.certificate_pem
            return self._configuration(shown)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(shown), newest, require_client_authentication=True
        )

    def sign(self, data: bytes) -> bytes:
        """Sign a record; :func:`verify_signed` checks it."""
        return self._identity.sign(RECORD_CONTEXT + data)

    def verify_record(
        self, data: bytes, signature: bytes, certificate_der: bytes, now_s: float | None = None
    ) -> Caller:
        """Who of this run signed ``data``; see :func:`verify_signed`.

        Raises:
            RefusedError: nobody did.
        """
        now_s = time.time() if now_s is None else now_s
        return verify_signed(data, signature, certificate_der, self.authority_pem, now_s)

    def _configuration(self, certificate_pem: bytes) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key_pem, certificate_pem)], self.authority_pem)

    def _take(self, certificate_pem: bytes) -> None:
        certificate = _load_pem(certificate_pem)
        der = certificate.public_bytes(serialization.Encoding.DER)
        caller = _issued(der, self.authority_pem)
        if (caller.run_id, caller.peer_id, caller.role) != (self.run_id, self.peer_id, self.role) or (
            self._identity.peer_id != self.peer_id
        ):
            raise RefusedError(
                f"The certificate is for {caller.role} {caller.peer_id} of run {caller.run_id}, "
                f"not for {self.role} {self.peer_id} of run {self.run_id}."
            )
        self._certificate_pem, self._certificate_der = certificate_pem, der
        self._expires_at_s = caller.expires_at_s
        self._lifetime_s = caller.expires_at_s - certificate.not_valid_before_utc.timestamp() - BACKDATED_S

    def __repr__(self) -> str:
        return f"Credentials({self.role} {self.peer_id} of run {self.run_id})"


def caller_of(context: Any) -> Caller:
    """Who calls, from the servicer context of a server with :meth:`Credentials.server_credentials`.

    Raises:
        RefusedError: no certificate, or not one of a run.
    """
    shown = context.auth_context().get("x509_pem_cert")
    if not shown:
        raise RefusedError(
            "The call comes without a certificate.",
            meaning="Only members of the run may call.",
            remedy="Enrol with an invitation.",
        )
    return _caller_of_pem(bytes(shown[0]))


def check_caller(caller: Caller, run_id: str, now_s: float, roles: Collection[str]) -> None:
    """Refuse a caller that may not call; TLS has checked its certificate only when it connected.

    Raises:
        RefusedError: of another run, expired since, or in a role that is not among ``roles``.
    """
    if caller.run_id != run_id:
        raise RefusedError(
            f"The certificate of {caller.peer_id} is of run {caller.run_id}, and this is run {run_id}.",
            remedy="Join with an invitation of this run.",
        )
    if now_s >= caller.expires_at_s:
        raise RefusedError(
            f"The certificate of {caller.peer_id} expired at {instant(caller.expires_at_s)}.",
            remedy="Renew it, or enrol again with a fresh invitation.",
        )
    if caller.role not in roles:
        raise RefusedError(
            f"The certificate of {caller.peer_id} is one of role {caller.role}, and this call is for "
            f"{', '.join(sorted(roles)) or 'nobody'}.",
        )


def verify_signed(data: bytes, signature: bytes, certificate_der: bytes, authority_pem: bytes, now_s: float) -> Caller:
    """Who signed ``data`` with :meth:`Credentials.sign`.

    Raises:
        RefusedError: the certificate is not from that authority, not valid now, an invitation's, or not of the key
            that signed.
    """
    certificate_der = bytes(certificate_der)
    caller = _issued(certificate_der, authority_pem)
    if caller.role is Role.INVITATION:
        raise RefusedError(f"The record is signed with invitation {caller.peer_id}, and only peers have records.")
    if not _starts_at_s(certificate_der) <= now_s < caller.expires_at_s:
        raise RefusedError(f"The certificate of {caller.peer_id} is valid until {instant(caller.expires_at_s)} only.")
    try:
        _public_key(_load_der(certificate_der)).verify(signature, RECORD_CONTEXT + data, SIGNATURE)
    except MALFORMED:
        raise RefusedError(f"The record is not signed by {caller.peer_id}, whose certificate comes with it.") from None
    return caller


def read_certificate(certificate: x509.Certificate) -> Caller:
    """Whom a certificate names; whether a run's authority issued it is not checked here.

    Raises:
        RefusedError: it is not like those that a run's authority issues.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        scheme, empty, run_id, role, peer_id = uri.split("/")
        caller = Caller(peer_id, run_id, Role(role), certificate.not_valid_after_utc.timestamp())
    except MALFORMED:
        raise RefusedError("The certificate is not one of a run.") from None
    if (scheme, empty) != ("swarm:", "") or peer_id_of(_public_key(certificate)) != peer_id:
        raise RefusedError("The certificate is not one of a run: the peer it names does not have its key.")
    return caller


def instant(at_s: float) -> str:
    """Seconds since the epoch for people, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))


@lru_cache(KNOWN_CERTIFICATES)
def _caller_of_pem(pem: bytes) -> Caller:
    return read_certificate(_load_pem(pem))


@lru_cache(KNOWN_CERTIFICATES)
def _issued(der: bytes, authority_pem: bytes) -> Caller:
    certificate = _load_der(der)
    try:
        certificate.verify_directly_issued_by(_load_pem(authority_pem))
    except MALFORMED:
        raise RefusedError(
            "The certificate was not issued by the authority of this run.",
            meaning="Whoever shows it belongs to another run, or to none.",
        ) from None
    return read_certificate(certificate)


@lru_cache(KNOWN_CERTIFICATES)
def _load_der(der: bytes) -> x509.Certificate:
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise RefusedError(f"The certificate has {len(der)} bytes, and {MAX_CERTIFICATE_BYTES} is the limit.")
    try:
        return x509.load_der_x509_certificate(der)
    except MALFORMED:
        raise RefusedError("What should be a certificate is none.") from None


def _load_pem(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except MALFORMED:
        raise RefusedError("What should be a certificate is none.") from None


def _starts_at_s(der: bytes) -> float:
    return _load_der(der).not_valid_before_utc.timestamp()


def _public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    try:
        key = certificate.public_key()
    except MALFORMED:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError("The certificate is not for an ECDSA P-256 key.")
    return key


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RefusedError("The private key is not an ECDSA key.")
    return key
