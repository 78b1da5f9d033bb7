"""Frames as chunks and back: sizes, alignment, copies, and what is refused."""

import tracemalloc

import numpy as np
import pytest

from swarm.config.spec import WireDtype
from swarm.core.frame import MAX_FRAME_BYTES, FrameHeader, FrameKind
from swarm.errors import FrameError
from swarm.net.frames import (
    CHUNK_BYTES,
    Assembler,
    BrokenStreamError,
    as_bytes_view,
    chunks,
    decode_header,
    encode_header,
    refusal,
)

MIB = 2**20
HEADER = FrameHeader(
    run_id="ab" * 16,
    view=3,
    step=7,
    microbatch=2,
    kind=FrameKind.ACTIVATION,
    source_stage=0,
    target_stage=1,
    rank=8,
    dtype=WireDtype.INT8,
    batch=4,
    time=128,
    route=("a", "b", "c"),
    attempt=1,
)


def assembler(guard=lambda sequence, header, size: None) -> Assembler:
    return Assembler(guard)


def messages(payload: bytes, sequence: int = 1) -> list[bytes]:
    return list(chunks(sequence, HEADER, memoryview(payload)))


def test_a_header_survives_the_wire():
    assert decode_header(encode_header(HEADER)) == HEADER


@pytest.mark.parametrize("data", [b"\xff", b"", encode_header(HEADER).replace(b"int8", b"int9")])
def test_what_is_no_header_is_refused(data):
    with pytest.raises(FrameError, match="header cannot be read"):
        decode_header(data)


@pytest.mark.parametrize("size", [0, 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 64 * MIB])
def test_frames_of_every_size_come_out_as_they_went_in(size):
    payload = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    it, frame = assembler(), None
    for message in chunks(1, HEADER, as_bytes_view(payload)):
        assert frame is None
        assert len(message) <= CHUNK_BYTES
        frame = it.feed(message)
    assert frame is not None
    assert frame.header == HEADER
    assert np.array_equal(np.frombuffer(frame.payload, np.uint8), payload)


def test_frames_follow_one_another():
    it = assembler()
    sizes = [len(it.feed(messages(bytes(n), sequence)[0]).payload) for sequence, n in enumerate((5, 0, 900), start=1)]
    assert sizes == [5, 0, 900]


def test_the_payload_of_one_chunk_is_the_buffer_that_came_aligned_within_it():
    (message,) = messages(b"x" * 1000)
    frame = assembler().feed(message)
    assert frame.payload.obj is message
    assert message.index(b"x" * 1000) % 64 == 0


def test_a_probe_brings_the_header_first_and_the_payload_still_without_a_copy():
    it = assembler()
    head, body = chunks(1, HEADER, memoryview(b"x" * 5000), probe=True)
    assert len(head) < 500
    assert it.feed(head) is None
    frame = it.feed(body)
    assert frame.payload.obj is body
    assert (frame.payload, it.first_size) == (b"x" * 5000, 0)
    assert [len(message) for message in chunks(1, HEADER, memoryview(b""), probe=True)] == [len(head)]


def test_a_probe_of_several_chunks_is_assembled():
    it = assembler()
    payload = bytes(range(256)) * 12_000
    *_, frame = [it.feed(message) for message in chunks(1, HEADER, memoryview(payload), probe=True)]
    assert frame.payload == payload


def test_an_assembled_payload_is_writable_and_aligned_in_memory():
    it = assembler()
    frame = [it.feed(message) for message in messages(bytes(3 * MIB))][-1]
    assert not frame.payload.readonly
    assert np.frombuffer(frame.payload, np.uint8).ctypes.data % 64 == 0


def test_a_64_mib_frame_takes_one_payload_and_a_few_chunks_of_memory_on_both_sides_together():
    payload = memoryview(bytes(64 * MIB))
    it = assembler()
    tracemalloc.start()
    for message in chunks(1, HEADER, payload):
        frame = it.feed(message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert frame is not None
    assert len(frame.payload) == 64 * MIB
    assert peak < 64 * MIB + 3 * CHUNK_BYTES


def test_the_guard_decides_before_memory_is_taken_and_the_rest_is_skipped():
    asked = []

    def guard(sequence, header, size):
        asked.append((sequence, size))
        if sequence == 1:
            raise refusal("no room")

    it = assembler(guard)
    first, *rest = messages(bytes(128 * MIB))[:4]
    tracemalloc.start()
    with pytest.raises(FrameError, match="no room"):
        it.feed(first)
    assert [it.feed(message) for message in rest] == [None] * 3
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()
    assert it.feed(messages(b"next", 2)[0]).payload == b"next"
    assert asked == [(1, 128 * MIB), (2, 4)]


def test_frames_over_the_limit_are_refused_on_both_sides():
    with pytest.raises(FrameError, match="above the limit"):
        next(chunks(1, HEADER, memoryview(np.empty(MAX_FRAME_BYTES + 1, np.uint8))))
    message = bytearray(messages(bytes(2 * MIB))[0])
    message[16:24] = (MAX_FRAME_BYTES + 1).to_bytes(8, "little")
    it = assembler(lambda *_: pytest.fail("the guard need not be asked"))
    with pytest.raises(FrameError, match="above the limit") as refused:
        it.feed(bytes(message))
    assert not isinstance(refused.value, BrokenStreamError)


def edited(message: bytes, at: int, value: int) -> bytes:
    return message[:at] + value.to_bytes(8, "little") + message[at + 8 :]


ONE, TWO, THREE = messages(bytes(3 * MIB - 3000))
OFFSET, TOTAL = 8, 16


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        ([ONE, THREE], "leaves a gap"),
        ([ONE, TWO, TWO], "overlaps"),
        ([ONE, ONE], "breaks off"),
        ([ONE, TWO, THREE, THREE], "without its beginning"),
        ([TWO], "without its beginning"),
        ([ONE, edited(TWO, TOTAL, 3 * MIB)], "announced"),
        ([ONE, edited(TWO, OFFSET, 5)], "overlaps"),
        ([edited(ONE, TOTAL, 10)], "announces 10 bytes"),
        ([ONE, messages(b"", 2)[0]], "breaks off"),
        ([messages(b"x", 2)[0]], "frame 2 begins at byte 0 after frame 0"),
        ([messages(b"x")[0], messages(b"x")[0]], "frame 1 begins at byte 0 after frame 1"),
        ([ONE + b"x"], "more than"),
        ([b"short"], "less than its prefix"),
        ([edited(ONE, 24, 2**31)], "header of"),
    ],
)
def test_chunks_that_do_not_follow_one_another_break_the_stream(stream, reason):
    it = assembler()
    *before, last = stream
    for message in before:
        it.feed(message)
    with pytest.raises(BrokenStreamError, match=reason):
        it.feed(last)
