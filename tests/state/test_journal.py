"""The journal gives back every record that was added, up to the first byte that is not as written."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CheckpointError
from swarm.state import Journal, Record, RecordKind

INPUT, GRADIENT, COMMIT = RecordKind.INPUT, RecordKind.GRADIENT, RecordKind.COMMIT
RECORDS = [
    Record(INPUT, 1, 0, b"header", b"payload-0"),
    Record(INPUT, 1, 1, b"", b""),
    Record(GRADIENT, 1, 0, b"g", bytes(range(256))),
    Record(COMMIT, 1, 0, b"c", b""),
    Record(INPUT, 2, 0, b"h", b"payload-1"),
]


def opened(folder: Path, run_id: str = "run", stage: int = 0) -> Journal:
    return Journal(folder, run_id=run_id, stage=stage)


def add(journal: Journal, *records: Record) -> None:
    for record in records:
        journal.append(record.kind, record.step, record.microbatch, record.header, record.payload)


def reopened(journal: Journal) -> Journal:
    journal.close()
    return opened(journal.folder)


def segment(journal: Journal, number: int = -1) -> Path:
    return sorted(journal.folder.glob("segment-*.log"))[number]


def exit_code_of(body: Callable[[], None]) -> int | None:
    """Run ``body`` in another process."""
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(30)
    return process.exitcode


@pytest.fixture
def journal(tmp_path) -> Journal:
    return opened(tmp_path / "journal")


def test_records_come_back_in_the_order_they_were_added(journal):
    add(journal, *RECORDS)
    assert list(journal.replay(0)) == RECORDS
    assert list(reopened(journal).replay(0)) == RECORDS


def test_replay_begins_after_the_step_of_the_checkpoint(journal):
    add(journal, *RECORDS)
    assert list(journal.replay(1)) == RECORDS[4:]
    assert list(journal.replay(2)) == []


def test_a_payload_may_be_any_buffer(journal):
    journal.append(INPUT, 1, 0, b"", memoryview(bytearray(b"abc")))
    assert next(journal.replay(0)).payload == b"abc"


def test_records_after_reopening_follow_those_before(journal):
    add(journal, *RECORDS[:2])
    again = reopened(journal)
    add(again, *RECORDS[2:])
    assert list(reopened(again).replay(0)) == RECORDS


def test_only_the_owner_can_read_it(journal):
    assert stat.S_IMODE(segment(journal).stat().st_mode) == 0o600
    assert stat.S_IMODE(journal.folder.stat().st_mode) == 0o700


def test_a_record_torn_at_any_byte_is_cut_off_and_the_next_one_follows_the_last_good(journal):
    add(journal, *RECORDS[:3])
    good = segment(journal).stat().st_size
    add(journal, RECORDS[3])
    journal.close()
    path = segment(journal)
    whole = path.read_bytes()
    for size in range(good, len(whole)):
        path.write_bytes(whole[:size])
        again = opened(journal.folder)
        assert list(again.replay(0)) == RECORDS[:3]
        assert path.stat().st_size == again.bytes == good
        add(again, RECORDS[4])
        again = reopened(again)
        assert list(again.replay(0)) == [*RECORDS[:3], RECORDS[4]]
        again.close()


def test_a_journal_torn_in_its_first_line_begins_again(journal):
    journal.close()
    path = segment(journal)
    first_line = path.read_bytes()
    for size in range(len(first_line)):
        path.write_bytes(first_line[:size])
        again = opened(journal.folder)
        assert list(again.replay(0)) == []
        add(again, RECORDS[0])
        again = reopened(again)
        assert list(again.replay(0)) == RECORDS[:1]
        again.close()


def test_a_corrupt_byte_anywhere_ends_the_journal_before_its_record(journal):
    ends = []
    for record in RECORDS:
        add(journal, record)
        ends.append(segment(journal).stat().st_size)
    journal.close()
    path = segment(journal)
    whole = path.read_bytes()
    for position in range(whole.index(b"\n") + 1, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        again = opened(journal.folder)
        intact = sum(end <= position for end in ends)
        assert list(again.replay(0)) == RECORDS[:intact]
        again.close()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.builds(
            Record,
            st.sampled_from(RecordKind),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.binary(max_size=20),
            st.binary(max_size=50),
        ),
        max_size=5,
    ),
    st.binary(max_size=40),
)
def test_whatever_follows_the_good_records_is_cut_off(tmp_path_factory, records, garbage):
    journal = opened(tmp_path_factory.mktemp("journal"))
    add(journal, *records)
    journal.close()
    with segment(journal).open("ab") as file:
        file.write(garbage)
    again = opened(journal.folder)
    assert list(again.replay(-1)) == records
    again.close()


def test_a_segment_goes_once_a_checkpoint_covers_all_of_it(journal):
    add(journal, *RECORDS[:4])
    journal.rotate(1)
    add(journal, RECORDS[4])
    journal.trim(0)
    assert list(journal.replay(0)) == RECORDS
    journal.trim(1)
    assert list(journal.replay(0)) == RECORDS[4:]
    assert len(list(journal.folder.glob("segment-*.log"))) == 1
    assert journal.bytes == segment(journal).stat().st_size


def test_a_segment_with_an_early_frame_of_the_next_step_stays(journal):
    early = RECORDS[4]
    add(journal, *RECORDS[:4], early)
    journal.rotate(1)
    journal.trim(1)
    assert list(journal.replay(1)) == [early]


def test_the_current_segment_is_never_trimmed(journal):
    add(journal, *RECORDS)
    journal.trim(99)
    assert list(journal.replay(0)) == RECORDS


def test_segments_keep_their_order_over_many_rotations(journal):
    records = [Record(INPUT, step, 0, b"", b"%d" % step) for step in range(1, 13)]
    for record in records:
        add(journal, record)
        journal.rotate(record.step)
    assert list(reopened(journal).replay(0)) == records


def test_a_future_that_was_given_up_is_gone_for_good(journal):
    add(journal, *RECORDS)
    journal.rotate(1)
    add(journal, Record(INPUT, 3, 0, b"", b"future"))
    journal.discard_after(1)
    again = reopened(journal)
    assert list(again.replay(0)) == RECORDS[:4]
    other = Record(INPUT, 2, 0, b"", b"another future")
    add(again, other)
    assert list(reopened(again).replay(1)) == [other]


def test_a_second_process_is_refused(journal):
    def second() -> None:
        with pytest.raises(CheckpointError, match=f"Another process uses the state directory {journal.folder.parent}"):
            opened(journal.folder)

    assert exit_code_of(second) == 0


def test_closing_releases_the_folder(journal):
    with pytest.raises(CheckpointError, match="Another process uses"):
        opened(journal.folder)
    journal.close()
    journal.close()
    opened(journal.folder).close()


def test_a_killed_process_leaves_every_record_it_was_done_with(tmp_path):
    def killed() -> None:
        journal = opened(tmp_path / "journal")
        for number in range(100):
            journal.append(INPUT, 1, number, b"h", bytes([number]) * 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_of(killed) == -signal.SIGKILL
    records = list(opened(tmp_path / "journal").replay(0))
    assert [record.microbatch for record in records] == list(range(100))
    assert all(record.payload == bytes([record.microbatch]) * 1000 for record in records)


@pytest.mark.parametrize(("run_id", "stage"), [("nur", 0), ("run", 1)])
def test_the_journal_of_another_run_or_stage_is_refused(journal, run_id, stage):
    journal.close()
    with pytest.raises(CheckpointError, match="belongs to another run or stage"):
        opened(journal.folder, run_id, stage)


def test_a_refused_journal_is_released_again(journal):
    journal.close()
    with pytest.raises(CheckpointError):
        opened(journal.folder, stage=1)
    opened(journal.folder).close()


@pytest.mark.parametrize("written", [None, 0, 5, 30])
def test_a_full_disk_is_reported_and_leaves_the_records_before(journal, monkeypatch, written):
    add(journal, *RECORDS[:2])
    writev = os.writev

    def full(fd, parts):
        if written is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(fd, [b"".join(parts)[:written]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(CheckpointError, match=r"could not be written: .* Make room"):
            add(journal, RECORDS[2])
    assert list(journal.replay(0)) == RECORDS[:2]
    add(journal, RECORDS[2])
    assert list(reopened(journal).replay(0)) == RECORDS[:3]


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        opened(tmp_path / "file" / "journal")
