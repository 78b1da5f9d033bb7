"""Records: what comes back is what was sealed; everything else is refused."""

from __future__ import annotations

import time
from dataclasses import replace

import msgpack
import pytest

from swarm.discovery.records import (
    MAX_ADDRESSES,
    MAX_LIFETIME_S,
    MAX_RECORD_BYTES,
    MAX_STAGE,
    RecordCheck,
    open_record,
    peer_key,
    seal_record,
    stage_key,
)
from swarm.errors import RefusedError
from swarm.net.authority import Role
from tests.discovery.nodes import record, said
from tests.net.certified import RUN_ID, member

ALICE = member("alice")
CHECK = RecordCheck(RUN_ID, ALICE.verify_record)
OWN = record("alice", 3)
KEY = peer_key(RUN_ID, ALICE.peer_id)
END_S = time.time() + 60


def sealed(what=OWN, key: str = KEY, end_s: float = END_S, seal=ALICE) -> bytes:
    return seal_record(what, key, end_s, seal)


@pytest.mark.parametrize("key", [KEY, stage_key(RUN_ID, 3)])
def test_a_sealed_record_comes_back_under_each_of_its_keys(key):
    stored_key, found = CHECK.open(sealed(key=key))
    assert (stored_key, said(found), found.expires_at_s) == (key, OWN, END_S)


@pytest.mark.parametrize("name", ["alice", "bob", "carol", "dave", "erin", "frank"])
def test_no_byte_can_be_altered(name):
    # Several, since which bits a certificate's signature covers depends on the signature.
    good = seal_record(record(name), peer_key(RUN_ID, member(name).peer_id), END_S, member(name))
    for place in range(len(good)):
        bad = bytes([*good[:place], good[place] ^ 1, *good[place + 1 :]])
        with pytest.raises(RefusedError):
            open_record(bad, ALICE.verify_record)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: sealed(seal=member("mallory")), "is signed by"),
        (lambda: sealed(seal=member("alice", run_id="cd" * 16)), "authority|run"),
        (lambda: sealed(key=stage_key(RUN_ID, 4)), "not one of its own"),
        (lambda: sealed(key=peer_key(RUN_ID, "bob")), "not one of its own"),
        (lambda: sealed(replace(OWN, role="coordinator"), f"{RUN_ID}/coordinator"), "announces itself as coordinator"),
        (lambda: sealed(end_s=ALICE.expires_at_s + 1), "outlives the certificate"),
        (lambda: sealed(replace(OWN, stage=MAX_STAGE + 1)), "its stage"),
        (lambda: sealed(end_s=float("nan")), "its end"),
        (lambda: b"", "cannot be read"),
        (lambda: b"\x91" * 2000, "cannot be read"),
        (lambda: b"x" * (MAX_RECORD_BYTES + 1), "more than 4096"),
        (lambda: msgpack.packb([b"", b"", b""]), "cannot be read"),
    ],
)
def test_refused(bad, reason):
    with pytest.raises(RefusedError, match=reason):
        CHECK.open(bad())


def test_a_record_may_not_claim_a_long_life():
    patient = member("patient", lifetime_s=1e6)
    key = peer_key(RUN_ID, patient.peer_id)
    with pytest.raises(RefusedError, match="claims more than 3600 s"):
        CHECK.open(sealed(record("patient"), key, time.time() + MAX_LIFETIME_S + 10, patient))


def test_a_record_of_another_run_is_refused():
    with pytest.raises(RefusedError, match="is for run"):
        RecordCheck("cd" * 16, ALICE.verify_record).open(sealed())


def test_a_bootstrap_may_be_coordinator():
    boot = member("boot", Role.BOOTSTRAP)
    key, found = CHECK.open(sealed(record("boot", None, role=Role.BOOTSTRAP), f"{RUN_ID}/coordinator", END_S, boot))
    assert (key, found.role, found.peer_id) == (f"{RUN_ID}/coordinator", "coordinator", boot.peer_id)


def test_too_many_addresses_are_refused_before_they_are_sent():
    with pytest.raises(RefusedError, match="17 addresses"):
        sealed(replace(OWN, addresses=("a:1",) * (MAX_ADDRESSES + 1)))


def test_a_record_seen_before_is_not_verified_again():
    calls = []
    check = RecordCheck(RUN_ID, lambda *parts: calls.append(parts) or ALICE.verify_record(*parts))
    one = sealed()
    assert check.open(one) == check.open(one)
    assert len(calls) == 1
