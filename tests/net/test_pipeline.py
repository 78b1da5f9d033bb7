"""Senders that do not keep to the protocol: refused, told why, and harmless to the others."""

import asyncio
import contextlib
from dataclasses import replace

import grpc
import pytest

from swarm.errors import FrameError, RefusedError
from swarm.net.authority import Role
from swarm.net.channel import END, failure, open_channel
from swarm.net.frames import BrokenStreamError, chunks
from swarm.net.link import Link, PipelineService
from swarm.net.messages import message_class
from swarm.net.pipeline import METHOD
from swarm.net.server import PeerServer
from tests.net.certified import member
from tests.net.test_frames import HEADER, MIB
from tests.net.test_link import DEADLINE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process


class Bare:
    """A stream to the service that sends whatever it is told to."""

    def __init__(self, address: str, name: str = "mallory", role: Role = Role.PEER):
        self.channel = open_channel(address, member(name, role), member("bob").peer_id, "test")
        self.call = self.channel.stream_stream(METHOD)(timeout=DEADLINE_S)

    async def send(self, *messages: bytes) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            for message in messages:
                await self.call.write(message)

    async def feedback(self) -> list:
        """All that comes until the stream ends; raises what it ends with."""
        kind, came = message_class("Feedback"), []
        try:
            while (data := await self.call.read()) is not END:
                came.append(kind.FromString(data))
        except grpc.aio.AioRpcError as error:
            raise failure(error, "the receiver") from error
        return came


@contextlib.asynccontextmanager
async def receiving(on_frame=lambda sender, header, payload: None, **options):
    service = PipelineService(on_frame, **options)
    server = PeerServer(member("bob"), ["127.0.0.1:0"], [service])
    (address,) = await server.start()
    try:
        yield address, service
    finally:
        await server.stop(0.0)


def frame(sequence: int, size: int = 1) -> list[bytes]:
    return list(chunks(sequence, HEADER, memoryview(bytes(size))))


@pytest.mark.parametrize("garbage", [b"", b"x" * 100, frame(2)[0], frame(1, 2 * MIB)[1]])
async def test_garbage_ends_the_stream_of_its_sender_and_of_nobody_else(garbage):
    came = []
    async with receiving(lambda sender, header, payload: came.append(sender)) as (address, service):
        link = Link(address, member("alice"), member("bob").peer_id)
        await link.connect(DEADLINE_S)
        bare = Bare(address)
        await bare.send(garbage)
        with pytest.raises(BrokenStreamError, match="stream of frames is broken"):
            await bare.feedback()
        await link.send(HEADER, b"x")
        await until(lambda: came == [member("alice").peer_id])
        assert service.refusals == {member("mallory").peer_id: 1}
        await link.close()


async def test_frames_without_credit_end_the_stream():
    idle = asyncio.Event()
    async with receiving(lambda sender, header, payload: idle.wait(), window_frames=2) as (address, _):
        bare = Bare(address)
        await bare.send(*frame(1), *frame(2), *frame(3))
        with pytest.raises(BrokenStreamError, match="Frame 3 came without credit"):
            await bare.feedback()
        idle.set()


async def test_frames_of_another_run_are_refused_before_memory_is_taken():
    other = replace(HEADER, run_id="f" * 32)
    async with receiving(run_id=HEADER.run_id) as (address, _):
        bare = Bare(address)
        await bare.send(next(chunks(1, other, memoryview(bytes(64 * MIB)))), *frame(2))
        await bare.call.done_writing()
        window, *rest = await bare.feedback()
        assert (window.window_frames, window.window_bytes) == (32, 64 * MIB)
        releases = [release for feedback in rest for release in feedback.releases]
        assert [release.sequence for release in releases] == [1, 2]
        assert "its run id is 'ffff" in releases[0].refusal
        assert releases[1].refusal == ""


async def test_half_a_frame_leaves_nothing_behind():
    async with receiving() as (address, service):
        bare = Bare(address)
        await bare.send(*frame(1, 8 * MIB)[:3])
        await bare.channel.close()
        await until(lambda: not service._inbound)
        link = Link(address, member("mallory"), member("bob").peer_id)
        await link.connect(DEADLINE_S)
        await link.send(HEADER, bytes(8 * MIB))
        await until(lambda: link.stats.frames_acked == 1)
        await link.close()


async def test_an_invitation_is_no_ticket_for_frames():
    async with receiving() as (address, _):
        with pytest.raises(RefusedError, match="role invitation"):
            await Bare(address, "guest", Role.INVITATION).feedback()


async def test_a_refusal_of_the_service_keeps_its_text_up_to_a_bound():
    def refuse(sender, header, size):
        raise FrameError("no " * 100_000)

    refused = []
    async with receiving(guard=refuse) as (address, _):
        link = Link(address, member("alice"), member("bob").peer_id, on_refused=lambda _, text: refused.append(text))
        await link.connect(DEADLINE_S)
        await link.send(HEADER, b"x")
        await until(lambda: refused)
        assert refused[0] == ("no " * 100_000)[:1000]
        await link.close()
