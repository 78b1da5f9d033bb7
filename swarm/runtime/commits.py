"""The coordinator's decisions on disk: one JSON object a line, appended before anyone is told."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from swarm.core.messages import Commit
from swarm.errors import CheckpointError


class CommitLog:
    """Commits, rewinds and terms of one run.

    A line that is torn by a crash is dropped: it was written before its decision was told to anybody, and the peers,
    who are all prepared, get the same decision again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self.commits: dict[int, Commit] = {}
        self.term = 0
        whole = self._read()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, whole)
        os.lseek(self._fd, whole, os.SEEK_SET)

    def begin_term(self) -> int:
        """A new term, above all before it."""
        self.term += 1
        self._write({"term": self.term})
        return self.term

    def commit(self, commit: Commit) -> None:
        """Keep a decision. Survives the death of the process at once, that of the machine after the next flush."""
        self.commits[commit.step] = commit
        self._write({"commit": asdict(commit)})

    def rewind(self, version: int) -> None:
        """Give up the commits above ``version``."""
        self._drop_above(version)
        self._write({"rewind": version})

    def close(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def _drop_above(self, version: int) -> None:
        self.commits = {step: commit for step, commit in self.commits.items() if step <= version}

    def _read(self) -> int:
        """Read what is there; returns the length of the whole lines."""
        if not self.path.exists():
            return 0
        whole = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            if "term" in entry:
                self.term = entry["term"]
            elif "rewind" in entry:
                self._drop_above(entry["rewind"])
            else:
                commit = Commit(**entry["commit"])
                self.commits[commit.step] = commit
        return whole

    def _write(self, entry: dict[str, object]) -> None:
        line = json.dumps(entry, allow_nan=True).encode() + b"\n"
        try:
            os.write(self._fd, line)
        except OSError as error:
            raise CheckpointError(
                f"The commit log {self.path.name} could not be written: {error}.",
                meaning="The coordinator commits nothing that it cannot keep, so training stops here.",
                remedy="Make room on the disk and start the bootstrap again: the run goes on where it was.",
            ) from error
