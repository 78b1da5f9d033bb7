"""The run's authority: what its certificates say, and what it does not sign."""

import datetime
import os

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.errors import RefusedError, UsageError
from swarm.net.authority import KEY_FILE, Role, RunAuthority, peer_id_of_csr, server_name
from swarm.net.identity import Identity, common_name

RUN_ID = "ab" * 16
NOW_S = 1_800_000_000.0


def issued(authority: RunAuthority, identity: Identity, role: Role) -> x509.Certificate:
    pem = authority.issue(identity.csr(), role=role, lifetime_s=3600, now_s=NOW_S)
    return x509.load_pem_x509_certificate(pem)


def names(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    value = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return value.get_values_for_type(x509.DNSName), value.get_values_for_type(x509.UniformResourceIdentifier)


@pytest.mark.parametrize("role", list(Role))
def test_a_certificate_names_run_role_and_peer(role):
    authority, identity = RunAuthority.create(RUN_ID, now_s=NOW_S), Identity.create()
    certificate = issued(authority, identity, role)
    certificate.verify_directly_issued_by(authority.certificate)
    dns, uris = names(certificate)
    assert uris == [f"swarm://{RUN_ID}/{role}/{identity.peer_id}"]
    assert dns[0] == server_name(identity.peer_id, RUN_ID) == f"{identity.peer_id}.{RUN_ID}.swarm"
    assert dns[1:] == ([f"bootstrap.{RUN_ID}.swarm"] if role is Role.BOOTSTRAP else [])


@pytest.mark.parametrize("role", list(Role))
def test_an_invitation_cannot_be_a_server(role):
    usage = issued(RunAuthority.create(RUN_ID), Identity.create(), role).extensions.get_extension_for_class(
        x509.ExtendedKeyUsage
    )
    assert (x509.oid.ExtendedKeyUsageOID.SERVER_AUTH in usage.value) == (role is not Role.INVITATION)
    assert x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH in usage.value


def test_it_is_valid_for_its_lifetime_and_backdated_by_a_day():
    certificate = issued(RunAuthority.create(RUN_ID, now_s=NOW_S), Identity.create(), Role.PEER)
    now = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    assert certificate.not_valid_after_utc == now + datetime.timedelta(hours=1)
    assert certificate.not_valid_before_utc == now - datetime.timedelta(days=1)


def test_the_same_directory_is_the_same_authority(tmp_path):
    first = RunAuthority.open(tmp_path, RUN_ID)
    again = RunAuthority.open(tmp_path, RUN_ID)
    assert again.fingerprint == first.fingerprint
    assert len(first.fingerprint) == 64
    issued(again, Identity.create(), Role.PEER).verify_directly_issued_by(first.certificate)


def test_the_directory_of_another_run_is_refused(tmp_path):
    RunAuthority.open(tmp_path, RUN_ID)
    with pytest.raises(UsageError, match=f"belongs to CN={RUN_ID}, not to run {'cd' * 16}"):
        RunAuthority.open(tmp_path, "cd" * 16)


def test_a_damaged_directory_is_refused(tmp_path):
    RunAuthority.open(tmp_path, RUN_ID)
    os.chmod(tmp_path / KEY_FILE, 0o644)
    with pytest.raises(UsageError, match="other users"):
        RunAuthority.open(tmp_path, RUN_ID)
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(UsageError, match=r"authority\.key is missing"):
        RunAuthority.open(tmp_path, RUN_ID)
    Identity.open(tmp_path, file=KEY_FILE)
    with pytest.raises(UsageError, match="do not belong together"):
        RunAuthority.open(tmp_path, RUN_ID)


def csr(key) -> bytes:
    builder = x509.CertificateSigningRequestBuilder().subject_name(common_name("x"))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("request_der", "reason"),
    [
        (b"", "not PKCS #10"),
        (b"garbage", "not PKCS #10"),
        (bytes(5000), "4096 is the limit"),
        (csr(ec.generate_private_key(ec.SECP384R1())), "not for an ECDSA P-256 key"),
    ],
)
def test_a_bad_request_is_refused(request_der, reason):
    with pytest.raises(RefusedError, match=reason):
        RunAuthority.create(RUN_ID).issue(request_der, role=Role.PEER, lifetime_s=60)


def test_a_request_for_somebody_elses_key_is_refused():
    mine, theirs = Identity.create(), Identity.create()
    key = [
        identity.key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )
        for identity in (mine, theirs)
    ]
    forged = mine.csr().replace(key[0], key[1])
    with pytest.raises(RefusedError, match="not signed with its own key"):
        RunAuthority.create(RUN_ID).issue(forged, role=Role.PEER, lifetime_s=60)


def test_the_peer_id_is_known_before_a_certificate_is_issued():
    identity = Identity.create()
    assert peer_id_of_csr(identity.csr()) == identity.peer_id
