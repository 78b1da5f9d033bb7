"""Links over mutually authenticated TLS on loopback: delivery, credit, refusals, loss."""

import asyncio
import contextlib
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from swarm.errors import FrameError, UnreachableError
from swarm.net.frames import refusal
from swarm.net.link import Link
from swarm.net.pipeline import MAX_REFUSALS_IN_A_ROW, PipelineService
from swarm.net.server import PeerServer
from tests.net.certified import certified
from tests.net.test_frames import HEADER, MIB

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process

DEADLINE_S = 20.0


class Receiver:
    """Keeps what comes; refuses the sizes in ``unwanted``; works as long as ``busy`` is set."""

    def __init__(self, **window: int):
        self.frames: list[tuple[str, object, bytes]] = []
        self.unwanted: set[int] = set()
        self.unusable: set[int] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.came = asyncio.Condition()
        self.service = PipelineService(self.on_frame, self.guard, **window)

    def guard(self, sender, header, size):
        if size in self.unwanted:
            raise refusal(f"{size} bytes are unwanted")

    async def on_frame(self, sender, header, payload):
        async with self.came:
            self.frames.append((sender, header, bytes(payload[:16])))
            self.came.notify_all()
        await self.idle.wait()
        if len(payload) in self.unusable:
            raise refusal("it holds a NaN")

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S), self.came:
            await self.came.wait_for(lambda: len(self.frames) >= count)


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def linked(receiver: Receiver, **options):
    alice, bob = certified("alice", "bob")
    server = PeerServer(bob, ["127.0.0.1:0"], [receiver.service])
    (address,) = await server.start()
    link = Link(address, alice, bob.peer_id, **options)
    await link.connect(DEADLINE_S)
    try:
        yield link, server
    finally:
        receiver.idle.set()
        await link.close()
        await server.stop(0.0)


async def test_frames_arrive_whole_in_order_and_with_their_sender():
    receiver = Receiver()
    async with linked(receiver) as (link, _):
        alice, _ = certified("alice", "bob")
        for n, size in enumerate((0, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 64 * MIB)):
            await link.send(replace(HEADER, step=n), np.full(size, n, np.uint8))
        await receiver.wait_for(5)
        assert [(sender, header.step, data[:1]) for sender, header, data in receiver.frames] == [
            (alice.peer_id, 0, b""),
            *[(alice.peer_id, n, bytes([n])) for n in range(1, 5)],
        ]


async def test_a_64_mib_frame_takes_its_size_and_a_few_chunks_of_memory():
    sizes = []
    receiver = Receiver()
    receiver.service.on_frame = lambda sender, header, payload: sizes.append(len(payload))
    async with linked(receiver) as (link, _):
        payload = memoryview(bytes(64 * MIB))
        tracemalloc.start()
        await link.send(HEADER, payload)
        await until(lambda: sizes)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sizes == [64 * MIB]
        assert peak < (64 + 8) * MIB


async def test_the_stats_count_what_was_carried_and_measure_the_path():
    receiver = Receiver()
    async with linked(receiver) as (link, _):
        assert link.stats.goodput_bytes_s is None
        await link.send(HEADER, bytes(8 * MIB))
        await link.send(HEADER, bytes(10))
        await until(lambda: link.stats.frames_acked == 2)
        stats = link.stats
        assert (stats.bytes_sent, stats.frames_sent, stats.queued_frames) == (8 * MIB + 10, 2, 0)
        assert stats.goodput_bytes_s > 1e6
        assert 0 < stats.rtt_s < 5


async def test_a_sender_waits_until_the_receiver_is_done_with_earlier_frames():
    receiver = Receiver(window_frames=2)
    receiver.idle.clear()
    async with linked(receiver) as (link, _):
        await link.send(HEADER, b"1")
        await link.send(HEADER, b"2")
        with pytest.raises(UnreachableError, match=r"took no frame within 0\.05 s"):
            await link.send(HEADER, b"3", deadline_s=0.05)
        assert link.lost_reason is None
        receiver.idle.set()
        await link.send(HEADER, b"4")
        await receiver.wait_for(3)
        assert [data for *_, data in receiver.frames] == [b"1", b"2", b"4"]


async def test_the_window_of_bytes_holds_and_a_larger_frame_passes_alone():
    receiver = Receiver(window_bytes=100)
    receiver.idle.clear()
    async with linked(receiver) as (link, _):
        await link.send(HEADER, bytes(500))
        with pytest.raises(UnreachableError, match="took no frame"):
            await link.send(HEADER, b"x", deadline_s=0.05)


async def test_the_queue_has_a_bound():
    receiver = Receiver(window_frames=1)
    receiver.idle.clear()
    async with linked(receiver, queue_frames=2) as (link, _):
        await link.send(HEADER, b"1")
        waiting = [asyncio.create_task(link.send(HEADER, b"2")) for _ in range(2)]
        await until(lambda: link.stats.queued_frames >= 2)
        with pytest.raises(UnreachableError, match="2 frames wait already"):
            await link.send(HEADER, b"3")
        receiver.idle.set()
        await asyncio.gather(*waiting)


async def test_refused_frames_come_back_with_the_reason_and_the_link_goes_on():
    receiver, refused = Receiver(), []
    receiver.unwanted, receiver.unusable = {3 * MIB}, {7}
    async with linked(receiver, on_refused=lambda header, text: refused.append((header.step, text))) as (link, _):
        await link.send(replace(HEADER, step=1), bytes(3 * MIB))
        await link.send(replace(HEADER, step=2), bytes(7))
        await link.send(replace(HEADER, step=3), bytes(8))
        await until(lambda: len(refused) == 2 and len(receiver.frames) == 2)
        assert sorted(refused) == [
            (1, f"Refused a frame: {3 * MIB} bytes are unwanted."),
            (2, "Refused a frame: it holds a NaN."),
        ]
        assert list(receiver.service.refusals.values()) == [2]
        assert link.stats.frames_refused == 2
        assert link.lost_reason is None


async def test_a_sender_of_nothing_but_refused_frames_is_disconnected():
    receiver = Receiver()
    receiver.unwanted = {1}
    async with linked(receiver) as (link, _):
        for _ in range(MAX_REFUSALS_IN_A_ROW):
            await link.send(HEADER, b"x")
        assert f"{MAX_REFUSALS_IN_A_ROW} frames in a row were refused" in await link.wait_lost()
        await link.connect(DEADLINE_S)
        await link.send(HEADER, b"good")
        await receiver.wait_for(1)


async def test_a_fault_of_the_receiver_itself_does_not_end_the_link():
    receiver, refused = Receiver(), []
    receiver.service.on_frame = lambda *_: 1 // 0
    async with linked(receiver, on_refused=lambda header, text: refused.append(text)) as (link, _):
        await link.send(HEADER, b"x")
        await until(lambda: refused)
        assert refused == ["The receiver failed at it; its log says why."]


async def test_a_frame_above_the_limit_never_leaves():
    async with linked(Receiver()) as (link, _):
        with pytest.raises(FrameError, match="above the limit"):
            await link.send(HEADER, np.empty(256 * MIB + 1, np.uint8))
        assert link.lost_reason is None


async def test_a_stopped_receiver_is_a_lost_link_and_connecting_again_works():
    receiver = Receiver()
    async with linked(receiver) as (link, server):
        await server.stop(0.0)
        assert await asyncio.wait_for(link.wait_lost(), DEADLINE_S)
        with pytest.raises(UnreachableError, match=rf"peer {link.peer_id} at 127"):
            await link.send(HEADER, b"x")
        with pytest.raises(UnreachableError, match=f"Cannot reach peer {link.peer_id}"):
            await link.connect(1.0)
        _, bob = certified("alice", "bob")
        again = PeerServer(bob, [link.address], [receiver.service])
        await again.start()
        await link.connect(DEADLINE_S)
        await link.send(HEADER, b"y")
        await receiver.wait_for(1)
        await link.close()
        await again.stop(0.0)


async def test_frames_sent_before_closing_arrive():
    receiver = Receiver()
    async with linked(receiver) as (link, _):
        for _ in range(20):
            await link.send(HEADER, bytes(100_000))
        await link.close()
        assert len(receiver.frames) == 20
        with pytest.raises(UnreachableError, match="not connected"):
            await link.send(HEADER, b"x")


async def test_a_send_given_up_half_way_loses_the_link():
    receiver = Receiver()
    async with linked(receiver) as (link, _):
        sending = asyncio.create_task(link.send(HEADER, bytes(200 * MIB)))
        await until(lambda: link.stats.queued_frames)
        await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert await asyncio.wait_for(link.wait_lost(), DEADLINE_S)
        assert receiver.frames == []
        await link.connect(DEADLINE_S)
        await link.send(HEADER, b"x")
        await receiver.wait_for(1)


async def test_connecting_again_from_the_same_peer_ends_the_older_stream():
    receiver = Receiver()
    async with linked(receiver) as (link, _):
        alice, _ = certified("alice", "bob")
        second = Link(link.address, alice, link.peer_id)
        await second.connect(DEADLINE_S)
        assert await asyncio.wait_for(link.wait_lost(), DEADLINE_S) == "the receiver ended it"
        await second.send(HEADER, b"x")
        await receiver.wait_for(1)
        await second.close()
