"""Frames as messages of at most 1 MiB, and back.

A message is ``prefix | header | zeros | payload slice``. The prefix says which frame the slice belongs to and where it
goes; the header (protobuf) comes with the first slice only; the zeros let the slice begin at a multiple of 64.

Copies of the payload: the sender joins each slice into its message and grpc copies the message into its own buffer; on
the other side grpc hands over one ``bytes`` a message, which *is* the payload of a frame in one chunk, and is copied
once more into the assembled payload otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from swarm.config.spec import WireDtype
from swarm.core.frame import MAX_FRAME_BYTES, FrameHeader, FrameKind
from swarm.errors import FrameError
from swarm.net.messages import message_class

CHUNK_BYTES = 2**20
"""Largest message, prefix and header included."""

MAX_HEADER_BYTES = 64 * 1024
"""Largest encoded header; a route of a thousand peers fits."""

ALIGNMENT = 64
"""The payload begins at a multiple of this in its message, and in memory when it was assembled."""

_PREFIX = struct.Struct("<QQQI")
"""sequence, offset of the slice, size of the payload, size of the header (0 in all chunks but the first)."""


class BrokenStreamError(FrameError):
    """Chunks do not follow one another: the two ends no longer agree on the stream, which has to end."""

    code = "broken_stream"


@dataclass(frozen=True, slots=True)
class Frame:
    """A complete frame.

    ``payload`` is read-only if it came in one message (then it is grpc's own buffer).
    """

    sequence: int
    header: FrameHeader
    payload: memoryview


def encode_header(header: FrameHeader) -> bytes:
    """``header`` as protobuf."""
    return message_class("FrameHeader")(
        run_id=header.run_id,
        view=header.view,
        step=header.step,
        microbatch=header.microbatch,
        kind=int(header.kind),
        source_stage=header.source_stage,
        target_stage=header.target_stage,
        rank=header.rank,
        dtype=header.dtype.value,
        batch=header.batch,
        time=header.time,
        route=header.route,
        attempt=header.attempt,
        limit=header.limit,
    ).SerializeToString()


def decode_header(data: bytes | memoryview) -> FrameHeader:
    """The inverse of :func:`encode_header`.

    Raises:
        FrameError: not a header, or a kind or dtype that this version does not know.
    """
    try:
        message = message_class("FrameHeader").FromString(bytes(data))
        return FrameHeader(
            run_id=message.run_id,
            view=message.view,
            step=message.step,
            microbatch=message.microbatch,
            kind=FrameKind(message.kind),
            source_stage=message.source_stage,
            target_stage=message.target_stage,
            rank=message.rank,
            dtype=WireDtype(message.dtype),
            batch=message.batch,
            time=message.time,
            route=tuple(message.route),
            attempt=message.attempt,
            limit=message.limit,
        )
    except (DecodeError, ValueError) as error:
        raise refusal(f"its header cannot be read ({error})") from None


def refusal(reason: str) -> FrameError:
    """A refused frame, with the sentence every refusal ends with."""
    return FrameError(
        f"Refused a frame: {reason}.",
        meaning="Nothing of it was used; the microbatch is repeated if it is missing.",
        remedy="If it goes on, the sender runs another version or another run spec: check its log.",
    )


def as_bytes_view(payload: object) -> memoryview:
    """``payload`` (anything contiguous with a buffer) as a flat view of its bytes, without a copy."""
    view = memoryview(payload)  # type: ignore[arg-type]
    return view.cast("B") if view.nbytes else memoryview(b"")


def chunks(sequence: int, header: FrameHeader, payload: memoryview, *, probe: bool = False) -> Iterator[bytes]:
    """The messages of one frame, each built when it is asked for: only one of them exists at a time.

    With ``probe`` the first message carries the header alone, so that the receiver sees a beginning and an end even of
    a small frame, and how fast the bytes between came.

    Raises:
        FrameError: payload or header above the limit.
    """
    total = len(payload)
    if total > MAX_FRAME_BYTES:
        raise refusal(f"its payload of {total} bytes is above the limit of {MAX_FRAME_BYTES}")
    head = encode_header(header)
    if len(head) > MAX_HEADER_BYTES:
        raise refusal(f"its header of {len(head)} bytes is above the limit of {MAX_HEADER_BYTES}")
    offset = 0
    while True:
        start = _payload_start(len(head))
        end = 0 if probe and head else min(total, offset + CHUNK_BYTES - start)
        prefix = _PREFIX.pack(sequence, offset, total, len(head))
        zeros = bytes(start - len(prefix) - len(head))
        yield b"".join((prefix, head, zeros, payload[offset:end]))
        offset, head = end, b""
        if offset >= total:
            return


class Assembler:
    """Puts the chunks of one stream together, one frame at a time.

    Args:
        guard: called with (sequence, header, payload size in bytes) of each frame before memory is taken for it;
            raises FrameError to refuse the frame. The rest of a refused frame is skipped.
    """

    def __init__(self, guard: Callable[[int, FrameHeader, int], None]) -> None:
        self._guard = guard
        self.sequence = 0
        """Number of the frame that began last; they count from 1."""
        self.first_size = 0
        """Payload bytes in the first chunk of that frame."""
        self._total = 0
        self._received = 0
        self._header: FrameHeader | None = None  # None while the rest of a frame is skipped, and between frames
        self._buffer: memoryview | None = None

    def feed(self, message: bytes) -> Frame | None:
        """Take the next message of the stream; returns the frame that it completes.

        Raises:
            FrameError: frame :attr:`sequence` is refused, the stream can go on.
            BrokenStreamError: a gap, an overlap, a repeat or a size that contradicts what was said before.
        """
        if len(message) > CHUNK_BYTES:
            raise self._broken(f"a message has {len(message)} bytes, more than {CHUNK_BYTES}")
        if len(message) < _PREFIX.size:
            raise self._broken(f"a message has {len(message)} bytes, less than its prefix")
        sequence, offset, total, header_size = _PREFIX.unpack_from(message)
        start = _payload_start(header_size)
        if header_size > MAX_HEADER_BYTES or start > len(message):
            raise self._broken(f"frame {sequence} announces a header of {header_size} bytes that is not there")
        piece = memoryview(message)[start:]
        if header_size:
            return self._begin(sequence, offset, total, message[_PREFIX.size : _PREFIX.size + header_size], piece)
        return self._go_on(sequence, offset, total, piece)

    def _begin(self, sequence: int, offset: int, total: int, head: bytes, piece: memoryview) -> Frame | None:
        if self._header is not None:
            raise self._broken(f"frame {self.sequence} breaks off at byte {self._received} of {self._total}")
        if sequence != self.sequence + 1 or offset:
            raise self._broken(f"frame {sequence} begins at byte {offset} after frame {self.sequence}")
        if len(piece) > total:
            raise self._broken(f"frame {sequence} announces {total} bytes and brings {len(piece)}")
        self.sequence, self._total, self._received, self.first_size = sequence, total, len(piece), len(piece)
        if total > MAX_FRAME_BYTES:
            raise refusal(f"its payload of {total} bytes is above the limit of {MAX_FRAME_BYTES}")
        header = decode_header(head)
        self._guard(sequence, header, total)
        if len(piece) == total:
            return Frame(sequence, header, piece)
        self._header = header
        if piece:
            self._buffer = _allocate(total)
            self._buffer[: len(piece)] = piece
        return None

    def _go_on(self, sequence: int, offset: int, total: int, piece: memoryview) -> Frame | None:
        if sequence != self.sequence or self._received == self._total:
            raise self._broken(f"a chunk of frame {sequence} comes after frame {self.sequence} without its beginning")
        if total != self._total:
            raise self._broken(f"frame {sequence} announced {self._total} bytes, now {total}")
        if offset != self._received:
            what = "leaves a gap" if offset > self._received else "overlaps"
            raise self._broken(f"frame {sequence} {what} at byte {offset}, {self._received} bytes were received")
        end = offset + len(piece)
        if not piece or end > total:
            raise self._broken(f"a chunk of frame {sequence} has {len(piece)} of {total - offset} bytes left")
        self._received = end
        if self._header is None:
            return None
        if self._buffer is None:
            self._buffer = piece if end == total else _allocate(total)
        if self._buffer is not piece:
            self._buffer[offset:end] = piece
        if end < total:
            return None
        frame = Frame(sequence, self._header, self._buffer)
        self._header = self._buffer = None
        return frame

    def _broken(self, reason: str) -> BrokenStreamError:
        self._header = self._buffer = None
        return BrokenStreamError(
            f"The stream of frames is broken: {reason}.",
            meaning="The link ends here; complete frames are kept.",
            remedy="Connect again; if it goes on, sender and receiver run different versions.",
        )


def _payload_start(header_size: int) -> int:
    return -(-(_PREFIX.size + header_size) // ALIGNMENT) * ALIGNMENT


def _allocate(size: int) -> memoryview:
    # Not a bytearray: that writes zeros, and so takes all the memory that a sender merely announced.
    room = np.empty(size + ALIGNMENT, dtype=np.uint8)
    skip = -room.ctypes.data % ALIGNMENT
    return memoryview(room.data)[skip : skip + size]
