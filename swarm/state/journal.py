"""The redo journal of one stage: every frame that was used and every commit, in order.

With the newest checkpoint it gives back the exact state of a killed peer. Records are handed to the operating system in
one call each, which survives the death of the process at any moment; a power cut may lose the tail, and a torn tail is
found by its checksum and cut off. Segments begin at checkpoints, so that old ones can be deleted whole.

Record: length of all that follows the checksum (u32), CRC-32 of it (u32), kind (u8), step (u32), microbatch (u32),
header length (u16), header, payload; little-endian.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from swarm.errors import CheckpointError

MAX_RECORD_BYTES = 2**30
_FRONT = struct.Struct("<II")
_FIELDS = struct.Struct("<BIIH")


class RecordKind(IntEnum):
    """What happened."""

    INPUT = 1
    """An activation frame was accepted."""
    GRADIENT = 2
    """A gradient frame was accepted."""
    COMMIT = 3
    """A step was committed."""


@dataclass(frozen=True, slots=True)
class Record:
    """One entry. ``header`` is opaque to the journal."""

    kind: RecordKind
    step: int
    microbatch: int
    header: bytes
    payload: bytes


@dataclass(slots=True)
class _Segment:
    path: Path
    bytes: int = 0
    highest_step: int = 0


class Journal:
    """The journal in ``folder``; one process at a time.

    Raises:
        CheckpointError: the folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path, *, run_id: str, stage: int) -> None:
        self.folder = folder
        self._magic = f"swarm-journal 1 {run_id} {stage}\n".encode()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._failed(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(
                f"Another process uses the state directory {folder.parent}.",
                meaning="Two peers with one state would overwrite each other's; this one was not started.",
                remedy="Stop the other process, or give this one a --state-dir of its own.",
            ) from None
        self._fd = -1
        try:
            self._segments = [_Segment(path) for path in sorted(folder.glob("segment-*.log"))]
            for segment in self._segments:
                self._scan(segment)
            if self._segments:
                self._open(self._segments[-1])
            else:
                self.rotate(0)
        except (OSError, CheckpointError) as error:
            os.close(self._lock)
            if isinstance(error, CheckpointError):
                raise
            raise self._failed(error) from error

    @property
    def bytes(self) -> int:
        """Size of all segments."""
        return sum(segment.bytes for segment in self._segments)

    def append(
        self, kind: RecordKind, step: int, microbatch: int, header: bytes, payload: bytes | bytearray | memoryview
    ) -> None:
        """Add a record; the payload is not copied.

        Raises:
            CheckpointError: the disk refused; nothing, or only a torn tail that reading cuts off, was added.
        """
        fields = _FIELDS.pack(kind, step, microbatch, len(header)) + header
        length = len(fields) + len(payload)
        crc = zlib.crc32(payload, zlib.crc32(fields))
        parts = [_FRONT.pack(length, crc), fields, payload]
        segment = self._segments[-1]
        try:
            written = os.writev(self._fd, parts)
            if written != _FRONT.size + length:
                os.ftruncate(self._fd, segment.bytes)
                raise OSError(f"only {written} of {_FRONT.size + length} bytes were written")
        except OSError as error:
            raise self._failed(error) from error
        segment.bytes += written
        segment.highest_step = max(segment.highest_step, step)

    def rotate(self, step: int) -> None:
        """Begin a new segment, since a checkpoint of ``step`` is about to be written."""
        number = int(self._segments[-1].path.stem.split("-")[1]) + 1 if self._segments else 0
        segment = _Segment(self.folder / f"segment-{number:08d}-{step:010d}.log")
        try:
            fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            os.write(fd, self._magic)
        except OSError as error:
            raise self._failed(error) from error
        if self._fd >= 0:
            os.close(self._fd)
        segment.bytes = len(self._magic)
        self._fd = fd
        self._segments.append(segment)

    def trim(self, step: int) -> None:
        """Delete the segments, but the current one, that have only records of ``step`` and before."""
        kept: list[_Segment] = []
        for segment in self._segments[:-1]:
            if segment.highest_step <= step:
                segment.path.unlink(missing_ok=True)
            else:
                kept.append(segment)
        self._segments = [*kept, self._segments[-1]]

    def replay(self, after_step: int) -> Iterator[Record]:
        """All records of steps above ``after_step``, in the order they were added."""
        for segment in list(self._segments):
            for record, _ in self._read(segment.path):
                if record.step > after_step:
                    yield record

    def discard_after(self, step: int) -> None:
        """Rewrite the journal without the records of steps above ``step``: their future was given up."""
        kept = [record for record in self.replay(-1) if record.step <= step]
        old = list(self._segments)
        self.rotate(step)
        for record in kept:
            self.append(record.kind, record.step, record.microbatch, record.header, record.payload)
        for segment in old:
            segment.path.unlink(missing_ok=True)
        self._segments = self._segments[-1:]

    def close(self) -> None:
        """Release the folder. Closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._lock)
            self._fd = -1

    def _open(self, segment: _Segment) -> None:
        self._fd = os.open(segment.path, os.O_WRONLY | os.O_APPEND)

    def _scan(self, segment: _Segment) -> None:
        """Find the end of the good records and cut off what follows."""
        end = len(self._magic)
        for record, end in self._read(segment.path):  # noqa: B007
            segment.highest_step = max(segment.highest_step, record.step)
        if segment.path.stat().st_size < len(self._magic):
            segment.path.write_bytes(self._magic)
        elif segment.path.stat().st_size > end:
            os.truncate(segment.path, end)
        segment.bytes = end

    def _read(self, path: Path) -> Iterator[tuple[Record, int]]:
        """Good records from the start, each with the offset after it."""
        with path.open("rb") as file:
            magic = file.read(len(self._magic))
            if magic != self._magic:
                if len(magic) == len(self._magic):
                    raise CheckpointError(
                        f"The journal {path.name} belongs to another run or stage.",
                        meaning="This peer cannot continue from it.",
                        remedy="Choose another --state-dir.",
                    )
                return
            offset = len(magic)
            while len(front := file.read(_FRONT.size)) == _FRONT.size:
                length, crc = _FRONT.unpack(front)
                if not _FIELDS.size <= length <= MAX_RECORD_BYTES:
                    return
                body = file.read(length)
                if len(body) != length or zlib.crc32(body) != crc:
                    return
                kind, step, microbatch, header_length = _FIELDS.unpack_from(body)
                start = _FIELDS.size + header_length
                offset += _FRONT.size + length
                yield Record(RecordKind(kind), step, microbatch, body[_FIELDS.size : start], body[start:]), offset

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"The journal in {self.folder} could not be written: {error}.",
            meaning="A peer that is killed now could not come back to this step by itself.",
            remedy="Make room on the disk, or choose another --state-dir.",
        )
