"""Who a peer is: a key pair, and the peer id that follows from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.errors import UsageError
from swarm.net.private import read_private, write_private

KEY_FILE = "identity.key"
PEER_ID_DIGITS = 20

SIGNATURE = ec.ECDSA(hashes.SHA256())
"""The only signature used; gRPC does not accept Ed25519 certificates."""

MALFORMED = (
    ValueError,
    TypeError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What reading keys, requests and certificates raises when they are not what they should be."""


@dataclass(frozen=True)
class Identity:
    """An ECDSA P-256 key pair. Its string forms never show the private key."""

    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls) -> Self:
        """A new identity, kept nowhere."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def open(cls, state_dir: Path, *, file: str = KEY_FILE) -> Self:
        """The identity kept in ``state_dir``; created (mode 0600) if there is none.

        Raises:
            UsageError: the file cannot be used, other users may read it, or it holds no P-256 key.
        """
        path = Path(state_dir) / file
        pem = read_private(path)
        if pem is None:
            identity = cls.create()
            write_private(path, identity.key_pem)
            return identity
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except MALFORMED:
            key = None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise UsageError(
                f"{path} does not hold an ECDSA P-256 key.",
                meaning="This peer cannot show who it is.",
                remedy="Put the file back, or delete it to become a new peer and enrol again.",
            )
        return cls(key)

    @property
    def peer_id(self) -> str:
        """The first 20 hex digits of the SHA-256 of the public key."""
        return peer_id_of(self.key.public_key())

    @property
    def key_pem(self) -> bytes:
        """The private key, PKCS #8 PEM."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def sign(self, data: bytes) -> bytes:
        """ECDSA with SHA-256, DER."""
        return self.key.sign(data, SIGNATURE)

    def csr(self) -> bytes:
        """A certificate signing request, DER."""
        builder = x509.CertificateSigningRequestBuilder().subject_name(common_name(self.peer_id))
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def peer_id_of(key: ec.EllipticCurvePublicKey) -> str:
    """The peer id of whoever has the private key to ``key``."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()[:PEER_ID_DIGITS]


def common_name(name: str) -> x509.Name:
    """The X.509 name CN=``name``."""
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
