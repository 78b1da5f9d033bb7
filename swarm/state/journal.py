"""The redo journal of one stage: every frame that was used and every commit, in order.

With the newest checkpoint it gives back the exact state of a killed peer. Records are handed to the operating system in
one call each, which survives the death of the process at any moment; a power cut may lose the tail, and a torn tail is
found by its checksum and cut off. Segments begin at checkpoints, so that old ones can be deleted whole. If a segment
before the last was cut, the next one still follows: it is what a checkpoint after the gap needs. Who replays across the
gap finds a COMMIT missing, or frames of one, and must stop there.

Record: length of all that follows the checksum (u32), CRC-32 of it (u32), kind (u8), step (u32), microbatch (u32),
header length (u16), header, payload; little-endian.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from swarm.errors import CheckpointError

MAX_RECORD_BYTES = 2**30
_FRONT = struct.Struct("<II")
_FIELDS = struct.Struct("<BIIH")
_NAME = re.compile(r"segment-(\d{8})-\d{10}\.log")
_TEMPORARY = ".part"
_MAGIC = b"swarm-journal"


class RecordKind(IntEnum):
    """What happened."""

    INPUT = 1
    """An activation frame was accepted."""
    GRADIENT = 2
    """A gradient frame was accepted."""
    COMMIT = 3
    """A step was committed."""


_KINDS = frozenset(int(kind) for kind in RecordKind)


@dataclass(frozen=True, slots=True)
class Record:
    """One entry. ``header`` is opaque to the journal."""

    kind: RecordKind
    step: int
    microbatch: int
    header: bytes
    payload: bytes


@dataclass(slots=True, eq=False)
class _Segment:
    path: Path
    bytes: int = 0
    highest_step: int = 0

    @property
    def number(self) -> int:
        return int(self.path.name.split("-")[1])


class Journal:
    """The journal in ``folder``; one process at a time.

    Raises:
        CheckpointError: the folder cannot be used, another process uses it, or it belongs to another run or stage.
    """

    def __init__(self, folder: Path, *, run_id: str, stage: int) -> None:
        self.folder = folder
        self._magic = _MAGIC + f" 1 {run_id} {stage}\n".encode()
        self._fd = -1
        self._torn = False
        self._segments: list[_Segment] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._take_lock()
            for stale in folder.glob(f"*{_TEMPORARY}"):
                stale.unlink()
            self._segments = [_Segment(path) for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name)]
            for segment in self._segments:
                self._scan(segment)
            if self._segments:
                self._fd = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND)
            else:
                self.rotate(0)
        except OSError as error:
            os.close(self._lock)
            raise self._failed(error) from error
        except CheckpointError:
            os.close(self._lock)
            raise

    @property
    def bytes(self) -> int:
        """Size of all segments."""
        return sum(segment.bytes for segment in self._segments)

    def append(
        self, kind: RecordKind, step: int, microbatch: int, header: bytes, payload: bytes | bytearray | memoryview
    ) -> None:
        """Add a record; the payload (any contiguous buffer) is not copied.

        Raises:
            CheckpointError: the disk refused, or the record is too large. It is not in the journal; those before are,
                and those that are added later.
        """
        segment = self._segments[-1]
        parts, size = self._framed(kind, step, microbatch, header, payload)
        try:
            self._mend()
            self._torn = True
            _write(self._fd, parts, size)
            self._torn = False
        except OSError as error:
            with suppress(OSError):
                self._mend()
            raise self._failed(error) from error
        segment.bytes += size
        segment.highest_step = max(segment.highest_step, step)

    def rotate(self, step: int) -> None:
        """Begin a new segment, since a checkpoint of ``step`` is about to be written.

        Raises:
            CheckpointError: the disk refused; the segment before goes on.
        """
        number = self._segments[-1].number + 1 if self._segments else 0
        segment = _Segment(self.folder / f"segment-{number:08d}-{step:010d}.log", len(self._magic))
        try:
            fd = self._begin(segment.path)
        except OSError as error:
            raise self._failed(error) from error
        if self._fd >= 0:
            with suppress(OSError):
                self._mend()
            os.close(self._fd)
        self._fd = fd
        self._torn = False
        self._segments = [*self._segments, segment]

    def trim(self, step: int) -> None:
        """Delete the segments, but the current one, that have only records of ``step`` and before.

        Raises:
            CheckpointError: one could not be deleted.
        """
        for segment in self._segments[:-1]:
            if segment.highest_step > step:
                continue
            try:
                segment.path.unlink(missing_ok=True)
            except OSError as error:
                raise self._failed(error) from error
            self._segments = [other for other in self._segments if other is not segment]

    def replay(self, after_step: int) -> Iterator[Record]:
        """All records of steps above ``after_step``, in the order they were added, one in memory at a time.

        Raises:
            CheckpointError: the disk refused.
        """
        try:
            for segment in self._segments:
                for record, _ in self._read(segment.path):
                    if record.step > after_step:
                        yield record
        except OSError as error:
            raise self._failed(error, "read") from error

    def discard_after(self, step: int) -> None:
        """Take out the records of steps above ``step``: their future was given up.

        Segments are replaced whole, the newest first. So a process killed in between leaves records of that future
        only up to some moment of it, never some without those before, and may call this again.

        Raises:
            CheckpointError: the disk refused; call again before appending.
        """
        try:
            for segment in reversed(self._segments):
                if segment.highest_step > step:
                    self._rewrite(segment, step)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Release the folder. Closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._lock)
            self._fd = -1

    # writing

    def _framed(
        self, kind: RecordKind, step: int, microbatch: int, header: bytes, payload: bytes | bytearray | memoryview
    ) -> tuple[list[bytes | bytearray | memoryview], int]:
        fields = _FIELDS.pack(kind, step, microbatch, len(header)) + header
        length = len(fields) + memoryview(payload).nbytes
        if length > MAX_RECORD_BYTES:
            # It would be taken for a torn one when it is read.
            raise CheckpointError(
                f"A record of {length} bytes is above the journal's limit of {MAX_RECORD_BYTES}.",
                meaning="It was not written; a peer that is killed now could not come back to this step by itself.",
                remedy="Use smaller microbatches.",
            )
        crc = zlib.crc32(payload, zlib.crc32(fields))
        return [_FRONT.pack(length, crc), fields, payload], _FRONT.size + length

    def _mend(self) -> None:
        """Cut off what a refused write left; until that worked nothing may follow it."""
        if self._torn:
            os.ftruncate(self._fd, self._segments[-1].bytes)
            self._torn = False

    def _begin(self, path: Path) -> int:
        """A descriptor of a new segment file with its first line in it."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            _write(fd, [self._magic], len(self._magic))
        except OSError:
            os.close(fd)
            with suppress(OSError):
                path.unlink()
            raise
        return fd

    def _rewrite(self, segment: _Segment, step: int) -> None:
        """Replace ``segment`` by one without records of steps above ``step``."""
        temporary = segment.path.with_suffix(_TEMPORARY)
        kept = _Segment(segment.path, len(self._magic))
        fd = self._begin(temporary)
        try:
            for record, _ in self._read(segment.path):
                if record.step > step:
                    continue
                parts, size = self._framed(record.kind, record.step, record.microbatch, record.header, record.payload)
                _write(fd, parts, size)
                kept.bytes += size
                kept.highest_step = max(kept.highest_step, record.step)
            os.fsync(fd)
            os.replace(temporary, segment.path)
        except OSError:
            os.close(fd)
            with suppress(OSError):
                temporary.unlink()
            raise
        if segment is self._segments[-1]:
            # The open file has no name any more.
            os.close(self._fd)
            self._fd, self._torn = fd, False
        else:
            os.close(fd)
        segment.bytes, segment.highest_step = kept.bytes, kept.highest_step

    # reading

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another process uses the state directory {self.folder.parent}.",
                meaning="Two peers with one state would overwrite each other's; this one was not started.",
                remedy="Stop the other process, or give this one a --state-dir of its own.",
            ) from None

    def _scan(self, segment: _Segment) -> None:
        """Find the end of the good records and cut off what follows."""
        end = 0
        for record, end in self._read(segment.path):  # noqa: B007
            segment.highest_step = max(segment.highest_step, record.step)
        end = end or self._first_line(segment.path)
        if segment.path.stat().st_size > end:
            os.truncate(segment.path, end)
        segment.bytes = end

    def _first_line(self, path: Path) -> int:
        """Size of the first line, which is written anew if it is torn."""
        with path.open("rb") as file:
            whole = file.read(len(self._magic)) == self._magic
        if not whole:
            path.write_bytes(self._magic)
        return len(self._magic)

    def _read(self, path: Path) -> Iterator[tuple[Record, int]]:
        """Good records from the start, each with the offset after it."""
        with path.open("rb") as file:
            start = file.read(len(self._magic))
            if start != self._magic:
                if start.startswith(_MAGIC) and not self._magic.startswith(start):
                    raise CheckpointError(
                        f"The journal {path.name} belongs to another run or stage.",
                        meaning="This peer cannot continue from it.",
                        remedy="Choose another --state-dir.",
                    )
                return
            offset = len(start)
            size = os.fstat(file.fileno()).st_size
            while len(front := file.read(_FRONT.size)) == _FRONT.size:
                length, crc = _FRONT.unpack(front)
                offset += _FRONT.size + length
                # Compared to the file's size before memory is taken for it.
                if not _FIELDS.size <= length <= MAX_RECORD_BYTES or offset > size:
                    return
                body = file.read(length)
                if len(body) != length or zlib.crc32(body) != crc:
                    return
                kind, step, microbatch, header_length = _FIELDS.unpack_from(body)
                header_end = _FIELDS.size + header_length
                if kind not in _KINDS or header_end > length:
                    return
                header, payload = body[_FIELDS.size : header_end], body[header_end:]
                yield Record(RecordKind(kind), step, microbatch, header, payload), offset

    def _failed(self, error: OSError, what: str = "written") -> CheckpointError:
        return CheckpointError(
            f"The journal in {self.folder} could not be {what}: {error}.",
            meaning="A peer that is killed now could not come back to this step by itself.",
            remedy="Make room on the disk, or choose another --state-dir.",
        )


def _write(fd: int, parts: list[bytes | bytearray | memoryview], size: int) -> None:
    written = os.writev(fd, parts)
    if written != size:
        raise OSError(f"only {written} of {size} bytes were written")
