"""The coordinator's decisions on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.core.messages import Commit
from swarm.errors import CheckpointError
from swarm.runtime.commits import CommitLog


def commit(step: int) -> Commit:
    return Commit(step, 0.5, 2.25, 1.5)


def test_decisions_are_found_again_and_terms_grow(tmp_path: Path) -> None:
    log = CommitLog(tmp_path / "commits.jsonl")
    assert log.begin_term() == 1
    for step in (1, 2, 3):
        log.commit(commit(step))
    log.close()
    again = CommitLog(tmp_path / "commits.jsonl")
    assert again.commits == {step: commit(step) for step in (1, 2, 3)}
    assert again.begin_term() == 2


def test_a_decision_survives_without_closing(tmp_path: Path) -> None:
    log = CommitLog(tmp_path / "commits.jsonl")
    log.commit(commit(1))
    assert CommitLog(tmp_path / "commits.jsonl").commits == {1: commit(1)}


def test_a_rewind_gives_up_what_is_above(tmp_path: Path) -> None:
    log = CommitLog(tmp_path / "commits.jsonl")
    for step in (1, 2, 3):
        log.commit(commit(step))
    log.rewind(1)
    log.commit(commit(2))
    assert sorted(CommitLog(tmp_path / "commits.jsonl").commits) == [1, 2]


def test_a_torn_last_line_is_dropped_and_writing_goes_on_after_the_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "commits.jsonl"
    log = CommitLog(path)
    log.commit(commit(1))
    log.commit(commit(2))
    log.close()
    path.write_bytes(path.read_bytes()[:-9])
    again = CommitLog(path)
    assert sorted(again.commits) == [1]
    again.commit(commit(2))
    assert sorted(CommitLog(path).commits) == [1, 2]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    CommitLog(tmp_path / "commits.jsonl").begin_term()
    assert (tmp_path / "commits.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_said_before_anyone_is_told_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog(tmp_path / "commits.jsonl")

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        log.commit(commit(1))
