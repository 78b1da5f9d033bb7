"""Identities: created once, kept private, and the peer id follows from the key."""

import hashlib
import os
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from swarm.errors import UsageError
from swarm.net.identity import KEY_FILE, SIGNATURE, Identity


def test_the_same_directory_is_the_same_peer(tmp_path):
    first = Identity.open(tmp_path / "state")
    assert Identity.open(tmp_path / "state").peer_id == first.peer_id
    assert Identity.open(tmp_path / "other").peer_id != first.peer_id


def test_the_peer_id_is_the_start_of_the_hash_of_the_public_key():
    identity = Identity.create()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    der = identity.key.public_key().public_bytes(serialization.Encoding.DER, form)
    assert identity.peer_id == hashlib.sha256(der).hexdigest()[:20]


def test_only_the_owner_may_read_the_key(tmp_path):
    Identity.open(tmp_path)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    Identity.open(tmp_path)
    os.chmod(tmp_path / KEY_FILE, mode)
    with pytest.raises(UsageError, match=rf"may be read by other users \(mode {mode:04o}\).*chmod 600"):
        Identity.open(tmp_path)


def pem(key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"not a key", pem(ed25519.Ed25519PrivateKey.generate()), pem(ec.generate_private_key(ec.SECP384R1()))],
    ids=["empty", "garbage", "Ed25519", "P-384"],
)
def test_a_file_without_a_p256_key_is_refused_and_kept(tmp_path, content):
    path = tmp_path / KEY_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="does not hold an ECDSA P-256 key"):
        Identity.open(tmp_path)
    assert path.read_bytes() == content


def test_a_directory_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        Identity.open(tmp_path / "file")


def test_what_it_signs_can_be_verified_and_its_text_shows_no_key():
    identity = Identity.create()
    identity.key.public_key().verify(identity.sign(b"data"), b"data", SIGNATURE)
    assert repr(identity) == f"Identity({identity.peer_id})"
