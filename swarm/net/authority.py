"""The certificate authority of a run: who has one of its certificates is a member, and nobody else is."""

from __future__ import annotations

import datetime
import hashlib
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.errors import RefusedError, UsageError
from swarm.net.identity import MALFORMED, Identity, common_name, peer_id_of
from swarm.net.private import read_private, write_private

KEY_FILE = "authority.key"
CERTIFICATE_FILE = "authority.pem"

BACKDATED_S = 86_400
"""Certificates are valid from a day before they are issued, so that a peer whose clock is behind gets as far as the
clock check of enrolment, which tells the offset, and does not fail in the TLS handshake, which tells nothing."""

AUTHORITY_LIFETIME_S = 10 * 365 * 86_400
MAX_CSR_BYTES = 4096
BOOTSTRAP_NAME = "bootstrap"
"""Certificates of bootstraps carry this name beside their peer id: an invitation need not know which one answers."""


class Role(StrEnum):
    """What a certificate is for."""

    BOOTSTRAP = "bootstrap"
    PEER = "peer"
    INVITATION = "invitation"
    """Enrolling, and asking for the state of the run."""


def server_name(peer_id: str, run_id: str) -> str:
    """The DNS name in the certificate of ``peer_id``; it is never looked up."""
    return f"{peer_id}.{run_id}.swarm"


@dataclass(frozen=True)
class RunAuthority:
    """Key and certificate of the authority of one run."""

    run_id: str
    identity: Identity
    certificate: x509.Certificate

    @classmethod
    def create(cls, run_id: str, *, now_s: float | None = None) -> Self:
        """A new authority, kept nowhere."""
        identity = Identity.create()
        name = common_name(run_id)
        builder = _certificate(name, name, identity.key.public_key(), AUTHORITY_LIFETIME_S, now_s)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(sign_certificates=True), critical=True)
        return cls(run_id, identity, builder.sign(identity.key, hashes.SHA256()))

    @classmethod
    def open(cls, state_dir: Path, run_id: str) -> Self:
        """The authority of ``run_id`` kept in ``state_dir``; created (mode 0600) if there is none.

        Raises:
            UsageError: the files cannot be used, do not belong together, or are those of another run.
        """
        state_dir = Path(state_dir)
        pem = read_private(state_dir / CERTIFICATE_FILE)
        if pem is None:
            authority = cls.create(run_id)
            # The certificate comes last: once it is there, so is its key.
            write_private(state_dir / KEY_FILE, authority.identity.key_pem)
            write_private(state_dir / CERTIFICATE_FILE, authority.pem)
            return authority
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except MALFORMED:
            raise _unusable(state_dir, f"{CERTIFICATE_FILE} holds no certificate") from None
        if certificate.subject != common_name(run_id):
            raise _unusable(state_dir, f"it belongs to {certificate.subject.rfc4514_string()}, not to run {run_id}")
        if not (state_dir / KEY_FILE).exists():
            raise _unusable(state_dir, f"{KEY_FILE} is missing")
        identity = Identity.open(state_dir, file=KEY_FILE)
        if identity.key.public_key() != certificate.public_key():
            raise _unusable(state_dir, f"{KEY_FILE} and {CERTIFICATE_FILE} do not belong together")
        return cls(run_id, identity, certificate)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, 64 hex digits."""
        return hashlib.sha256(self.der).hexdigest()

    def issue(self, csr: bytes, *, role: Role, lifetime_s: float, now_s: float | None = None) -> bytes:
        """A certificate (PEM) for the key in ``csr`` (DER), valid for ``lifetime_s`` from now on.

        Nothing but the public key is taken from the request.

        Raises:
            RefusedError: not a request, not signed by its own key, or not a P-256 key.
        """
        key = _requested_key(csr)
        peer_id = peer_id_of(key)
        names: list[x509.GeneralName] = [x509.DNSName(server_name(peer_id, self.run_id))]
        if role is Role.BOOTSTRAP:
            names.append(x509.DNSName(server_name(BOOTSTRAP_NAME, self.run_id)))
        names.append(x509.UniformResourceIdentifier(f"swarm://{self.run_id}/{role}/{peer_id}"))
        usages = [x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
        if role is not Role.INVITATION:
            usages.append(x509.oid.ExtendedKeyUsageOID.SERVER_AUTH)
        builder = _certificate(common_name(peer_id), self.certificate.subject, key, lifetime_s, now_s)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(sign_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.identity.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def peer_id_of_csr(csr: bytes) -> str:
    """The peer id that a certificate for ``csr`` (DER) would have.

    Raises:
        RefusedError: as for :meth:`RunAuthority.issue`.
    """
    return peer_id_of(_requested_key(csr))


def _requested_key(csr: bytes) -> ec.EllipticCurvePublicKey:
    if len(csr) > MAX_CSR_BYTES:
        raise RefusedError(f"The certificate request has {len(csr)} bytes, and {MAX_CSR_BYTES} is the limit.")
    try:
        request = x509.load_der_x509_csr(csr)
        signed = request.is_signature_valid
        key = request.public_key()
    except MALFORMED:
        raise RefusedError("The certificate request is not PKCS #10 in DER.") from None
    if not signed:
        raise RefusedError("The certificate request is not signed with its own key.")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RefusedError("The certificate request is not for an ECDSA P-256 key.")
    return key


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime_s: float, now_s: float | None
) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(int(time.time() if now_s is None else now_s), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(seconds=BACKDATED_S))
        .not_valid_after(now + datetime.timedelta(seconds=int(lifetime_s)))
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _unusable(state_dir: Path, reason: str) -> UsageError:
    return UsageError(
        f"The run authority in {state_dir} cannot be used: {reason}.",
        meaning="Without it no peer can be enrolled, and no certificate renewed.",
        remedy="Put its files back, or choose another state directory; all peers then need a new invitation.",
    )
