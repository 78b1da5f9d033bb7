"""The journal gives back every record that was added, up to the first byte that is not as written."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import CheckpointError
from swarm.state import Journal, Record, RecordKind
from swarm.state import journal as journal_module

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


def refusal(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    journal.append(INPUT, 1, 1, b"", memoryview(bytearray(8)).cast("f"))
    assert [record.payload for record in reopened(journal).replay(0)] == [b"abc", bytes(8)]


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


def test_discarding_keeps_the_segments_and_their_order(journal):
    add(journal, *RECORDS)
    journal.rotate(1)
    add(journal, Record(INPUT, 1, 3, b"", b"late"), Record(INPUT, 3, 0, b"", b"future"))
    journal.discard_after(1)
    assert [record.payload for record in journal.replay(0)] == [record.payload for record in RECORDS[:4]] + [b"late"]
    assert journal.bytes == sum(path.stat().st_size for path in journal.folder.glob("segment-*"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in journal.folder.glob("segment-*")] == [0o600, 0o600]
    journal.trim(1)
    assert [record.payload for record in journal.replay(0)] == [b"late"]


@pytest.mark.parametrize("replaced", range(3))
def test_a_process_killed_while_discarding_leaves_no_future_without_its_past(tmp_path, replaced):
    steps = list(range(1, 7))

    def killed() -> None:
        journal = opened(tmp_path / "journal")
        for step in steps:
            add(journal, Record(COMMIT, step, 0, b"", b""))
            if step % 2 == 0:
                journal.rotate(step)
        replace, calls = os.replace, iter(range(9))
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == replaced else replace(*paths)
        journal.discard_after(1)

    assert exit_code_of(killed) == -signal.SIGKILL
    journal = opened(tmp_path / "journal")
    left = [record.step for record in journal.replay(0)]
    assert left == steps[: len(steps) - 2 * replaced]
    journal.discard_after(1)
    assert [record.step for record in reopened(journal).replay(0)] == [1]
    assert not list(journal.folder.glob("*.part"))


def test_a_refused_discard_can_be_repeated(journal, monkeypatch):
    add(journal, *RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refusal)
        with pytest.raises(CheckpointError, match="No space left on device"):
            journal.discard_after(1)
    assert list(journal.replay(0)) == RECORDS
    journal.discard_after(1)
    add(journal, RECORDS[4])
    assert list(reopened(journal).replay(0)) == RECORDS


def test_discarding_holds_one_record_at_a_time(journal):
    record = Record(INPUT, 1, 0, b"", bytes(2**20))
    add(journal, *[record] * 24, Record(INPUT, 2, 0, b"", b"future"))
    tracemalloc.start()
    try:
        journal.discard_after(1)
        assert len([0 for _ in journal.replay(0)]) == 24
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * 2**20


def test_a_gap_before_the_last_segment_leaves_what_a_later_checkpoint_needs(journal):
    add(journal, *RECORDS[:4])
    journal.rotate(1)
    add(journal, RECORDS[4])
    journal.close()
    path = segment(journal, 0)
    path.write_bytes(path.read_bytes()[:-1])
    again = opened(journal.folder)
    assert list(again.replay(1)) == RECORDS[4:]
    # Who comes from before the gap meets step 2 without the commit of step 1.
    assert list(again.replay(0)) == [*RECORDS[:3], RECORDS[4]]


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


def test_nothing_follows_a_torn_record_that_could_not_be_cut_off(journal, monkeypatch):
    add(journal, RECORDS[0])
    writev = os.writev
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda fd, parts: writev(fd, [b"".join(parts)[:5]]))
        patch.setattr(os, "ftruncate", refusal)
        with pytest.raises(CheckpointError):
            add(journal, RECORDS[1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refusal)
        with pytest.raises(CheckpointError):
            add(journal, RECORDS[1])
    add(journal, RECORDS[2])
    assert list(reopened(journal).replay(0)) == [RECORDS[0], RECORDS[2]]


def test_a_refused_rotation_leaves_the_segment_before_and_can_be_repeated(journal, monkeypatch):
    add(journal, RECORDS[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refusal)
        with pytest.raises(CheckpointError, match="No space left on device"):
            journal.rotate(1)
    add(journal, RECORDS[1])
    journal.rotate(1)
    add(journal, RECORDS[2])
    assert list(reopened(journal).replay(0)) == RECORDS[:3]
    assert len(list(journal.folder.glob("segment-*"))) == 2


def test_a_record_that_reading_would_refuse_is_not_written(journal, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_RECORD_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"A record of 112 bytes is above the journal's limit of 100"):
        journal.append(INPUT, 1, 0, b"h", bytes(100))
    add(journal, RECORDS[0])
    assert list(journal.replay(0)) == RECORDS[:1]


def test_a_length_beyond_the_file_takes_no_memory(journal):
    journal.close()
    with segment(journal).open("ab") as file:
        file.write(struct.pack("<II", journal_module.MAX_RECORD_BYTES, 0) + bytes(100))
    tracemalloc.start()
    try:
        assert list(opened(journal.folder).replay(0)) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_a_first_line_that_a_power_cut_blanked_begins_again(journal):
    add(journal, RECORDS[0])
    journal.close()
    path = segment(journal)
    path.write_bytes(bytes(path.stat().st_size))
    again = opened(journal.folder)
    add(again, RECORDS[1])
    assert list(reopened(again).replay(0)) == RECORDS[1:2]


def test_other_files_in_the_folder_are_let_be(journal):
    add(journal, RECORDS[0])
    (journal.folder / "segment-notes.log").write_text("mine")
    again = reopened(journal)
    again.rotate(1)
    assert list(again.replay(0)) == RECORDS[:1]
    assert (journal.folder / "segment-notes.log").read_text() == "mine"


def test_a_folder_that_cannot_be_locked_is_not_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusal)
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left on device"):
        opened(tmp_path / "journal")


@pytest.mark.parametrize("use", [lambda journal: list(journal.replay(0)), lambda journal: journal.discard_after(0)])
def test_a_segment_that_is_gone_is_an_error_of_ours(journal, use):
    add(journal, RECORDS[0])
    segment(journal).unlink()
    with pytest.raises(CheckpointError, match="No such file or directory"):
        use(journal)


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        opened(tmp_path / "file" / "journal")
