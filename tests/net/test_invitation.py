"""Invitations: one line of text that cannot be altered, and a book that counts."""

import io
import random
import string
import threading

import pytest

from swarm.errors import InvitationError, UsageError
from swarm.net.authority import Role, RunAuthority
from swarm.net.invitation import BOOK_FILE, PREFIX, Invitation, InvitationBook

RUN_ID = "ab" * 16
AUTHORITY = RunAuthority.create(RUN_ID)
ADDRESSES = ["203.0.113.7:4001", "[2001:db8::17]:4001", "seed.example.org:4001"]
NOW_S = 1_800_000_000


def invite(book: InvitationBook | None = None, **changes) -> Invitation:
    given = {"uses": 3, "lifetime_s": 3600, "now_s": NOW_S} | changes
    return Invitation.create(AUTHORITY, given.pop("addresses", ADDRESSES), book=book, **given)


INVITATION = invite()
TEXT = INVITATION.encode()


def test_parsing_gives_what_was_encoded():
    assert Invitation.parse(TEXT, now_s=NOW_S).encode() == TEXT
    parsed = Invitation.parse(TEXT, now_s=NOW_S)
    assert (parsed.run_id, parsed.addresses, parsed.uses) == (RUN_ID, tuple(ADDRESSES), 3)
    assert (parsed.expires_at_s, parsed.authority) == (NOW_S + 3600, AUTHORITY.der)
    shown, mine = parsed.credentials(), INVITATION.credentials()
    assert (shown.role, shown.peer_id, shown.run_id) == (Role.INVITATION, INVITATION.invitation_id, RUN_ID)
    assert (shown.key_pem, shown.certificate_pem) == (mine.key_pem, mine.certificate_pem)


def test_the_text_is_one_short_url_safe_word():
    assert TEXT.startswith(PREFIX)
    assert set(TEXT) <= set(string.ascii_letters + string.digits + "-_.")
    assert len(TEXT) < 1100


def test_it_is_read_from_a_file_and_from_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "invitation"
    path.write_text(TEXT + "\n")
    assert Invitation.parse(path, now_s=NOW_S).encode() == TEXT
    assert Invitation.parse(str(path), now_s=NOW_S).encode() == TEXT
    monkeypatch.setattr("sys.stdin", io.StringIO(f"  {TEXT[:500]}\r\n{TEXT[500:]}\n"))
    assert Invitation.parse("-", now_s=NOW_S).encode() == TEXT


def test_any_altered_character_is_noticed():
    for at in range(len(PREFIX), len(TEXT)):
        other = "A" if TEXT[at] != "A" else "B"
        with pytest.raises(InvitationError, match="altered or cut short"):
            Invitation.parse(TEXT[:at] + other + TEXT[at + 1 :], now_s=NOW_S)


@pytest.mark.parametrize("kept", [len(PREFIX), len(PREFIX) + 1, 60, 200, len(TEXT) - 1])
def test_a_truncated_one_is_noticed(kept):
    with pytest.raises(InvitationError, match="altered or cut short"):
        Invitation.parse(TEXT[:kept], now_s=NOW_S)


def test_noise_and_bombs_are_refused():
    noise = random.Random(0)
    for size in (1, 64, 65, 500):
        with pytest.raises(InvitationError):
            Invitation.parse(PREFIX + "".join(noise.choices(string.ascii_letters, k=size)))
    with pytest.raises(InvitationError, match="longer than"):
        Invitation.parse(PREFIX + "A" * 20_000)
    with pytest.raises(InvitationError, match="altered"):
        Invitation.parse(TEXT + "AAAA", now_s=NOW_S)


@pytest.mark.parametrize("text", ["", "swarm2.AAAA", "no/such/file", "x" * 5000, "nul\0byte"])
def test_what_is_neither_an_invitation_nor_a_file_is_refused(text):
    with pytest.raises(InvitationError, match="no invitation"):
        Invitation.parse(text)


def test_a_file_with_something_else_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "text").write_text("hello")
    for name in ("binary", "text"):
        with pytest.raises(InvitationError, match="no invitation"):
            Invitation.parse(tmp_path / name)


def test_an_expired_one_says_when():
    with pytest.raises(InvitationError, match="expired at 2027-01-15 09:00:00 UTC"):
        Invitation.parse(TEXT, now_s=NOW_S + 3600)
    assert Invitation.parse(TEXT, now_s=NOW_S + 3599)
    assert Invitation.parse(TEXT, now_s=NOW_S + 9999, accept_expired=True)


@pytest.mark.parametrize(
    "changes",
    [{"addresses": []}, {"addresses": ["x:1"] * 17}, {"addresses": ["no port"]}, {"uses": 0}, {"lifetime_s": 0}],
)
def test_an_impossible_one_is_not_created(changes):
    with pytest.raises(UsageError):
        invite(**changes)


def test_its_text_form_shows_no_secret():
    assert TEXT not in repr(INVITATION)
    assert "PRIVATE" not in repr(INVITATION)


def test_a_peer_uses_an_invitation_once_however_often_it_enrols(tmp_path):
    book = InvitationBook(tmp_path)
    invitation = invite(book, uses=2)
    assert [book.redeem(invitation.invitation_id, peer, now_s=NOW_S) for peer in "aabba"] == [1, 1, 0, 0, 0]
    with pytest.raises(InvitationError, match="used up: 2 of 2 peers"):
        book.redeem(invitation.invitation_id, "c", now_s=NOW_S)
    assert book.redeem(invitation.invitation_id, "b", now_s=NOW_S) == 0


def test_the_book_survives_a_restart_and_is_private(tmp_path):
    invitation = invite(InvitationBook(tmp_path), uses=1)
    InvitationBook(tmp_path).redeem(invitation.invitation_id, "a", now_s=NOW_S)
    with pytest.raises(InvitationError, match="used up"):
        InvitationBook(tmp_path).redeem(invitation.invitation_id, "b", now_s=NOW_S)
    assert (tmp_path / BOOK_FILE).stat().st_mode & 0o077 == 0
    assert "PRIVATE" not in (tmp_path / BOOK_FILE).read_text()


def test_unknown_expired_and_revoked_ones_are_refused(tmp_path):
    book = InvitationBook(tmp_path)
    with pytest.raises(InvitationError, match="not known"):
        book.redeem(INVITATION.invitation_id, "a", now_s=NOW_S)
    invitation = invite(book)
    with pytest.raises(InvitationError, match="expired at 2027-01-15 09:00:00 UTC"):
        book.redeem(invitation.invitation_id, "a", now_s=NOW_S + 3600)
    book.redeem(invitation.invitation_id, "a", now_s=NOW_S)
    book.check_renewable("a")
    book.revoke(invitation.invitation_id)
    with pytest.raises(InvitationError, match="was revoked"):
        book.redeem(invitation.invitation_id, "a", now_s=NOW_S)
    with pytest.raises(InvitationError, match="was revoked"):
        book.check_renewable("a")
    book.check_renewable("somebody else")
    with pytest.raises(UsageError, match="no invitation"):
        book.revoke("unknown")


def test_enrolments_at_the_same_moment_do_not_exceed_the_uses(tmp_path):
    invitation = invite(InvitationBook(tmp_path), uses=5)
    granted = []

    def enrol(peer: str) -> None:
        try:
            InvitationBook(tmp_path).redeem(invitation.invitation_id, peer, now_s=NOW_S)
            granted.append(peer)
        except InvitationError:
            pass

    threads = [threading.Thread(target=enrol, args=(f"peer {n}",)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 5


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"uses": 1}}'])
def test_a_damaged_book_is_refused(tmp_path, content):
    path = tmp_path / BOOK_FILE
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="is damaged"):
        InvitationBook(tmp_path).redeem("a", "b")
