"""A link: the frames from one peer to another, on a connection of their own.

The receiver opens a window of frames and bytes, reports when each frame arrived, and gives its credit back when the
work that the frame caused is done. So a sender never has more in flight than the receiver has room for, and goodput
and round-trip time come from the traffic itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from swarm.core.frame import FrameHeader
from swarm.errors import UnreachableError
from swarm.net.channel import END, failure, open_channel
from swarm.net.credentials import Credentials
from swarm.net.frames import as_bytes_view, chunks
from swarm.net.goodput import PROBE_BYTES, GoodputMeter
from swarm.net.messages import message_class
from swarm.net.pipeline import METHOD, PipelineService

log = logging.getLogger(__name__)

__all__ = ["Link", "LinkStats", "PipelineService"]

QUEUE_FRAMES = 64
"""Default of ``queue_frames``: frames that may wait for their turn or for credit."""

SEND_DEADLINE_S = 60.0
"""Default deadline of one frame, from the call of ``send`` until its last byte is handed to the stream."""

CLOSE_DEADLINE_S = 1.0
"""How long closing waits for the other side."""

OnRefused = Callable[[FrameHeader, str], None]


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What a link has carried so far, over all its connections."""

    bytes_sent: int
    """Payload bytes handed to the stream."""
    frames_sent: int
    frames_acked: int
    """Frames that the receiver has completely."""
    frames_refused: int
    goodput_bytes_s: float | None
    """Payload bytes per second at which frames arrive; None until measured."""
    rtt_s: float | None
    """Shortest time lately between the end of a frame's sending and its acknowledgement; None until measured."""
    queued_frames: int
    """Frames waiting for their turn or for credit, or handed over and not yet there."""


class Link:
    """The sending end of a directed link to ``peer_id``.

    Lost links stay lost until :meth:`connect` is called again; what was in flight then is not repeated here.

    Args:
        address: host:port of the receiver.
        credentials: certificate of this peer.
        peer_id: the receiver; nobody else's certificate is accepted.
        queue_frames: frames that may wait in :meth:`send` at a time.
        on_refused: called with the header and the reason of each frame that the receiver refused.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        peer_id: str,
        *,
        queue_frames: int = QUEUE_FRAMES,
        on_refused: OnRefused | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.peer_id = peer_id
        self._credentials = credentials
        self._queue_frames = queue_frames
        self._on_refused = on_refused
        self._meter = GoodputMeter(clock)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._stream: _Stream | None = None
        self._bytes_sent = self._frames_sent = self._frames_acked = self._frames_refused = 0

    @property
    def lost_reason(self) -> str | None:
        """Why frames cannot be sent now; None while connected."""
        return "not connected" if self._stream is None else self._stream.lost_reason

    async def wait_lost(self) -> str:
        """Wait until the link is lost (which may be never: the caller gives the deadline); returns the reason."""
        if self._stream is None:
            return "not connected"
        return await asyncio.shield(self._stream.lost)

    @property
    def stats(self) -> LinkStats:
        return LinkStats(
            bytes_sent=self._bytes_sent,
            frames_sent=self._frames_sent,
            frames_acked=self._frames_acked,
            frames_refused=self._frames_refused,
            goodput_bytes_s=self._meter.goodput_bytes_s,
            rtt_s=self._meter.rtt_s,
            queued_frames=self._waiting + self._meter.in_flight,
        )

    async def connect(self, deadline_s: float) -> None:
        """Connect, or connect again after a loss; returns when the receiver has opened its window.

        Raises:
            UnreachableError: no window within ``deadline_s``.
            RefusedError: the receiver, or one of the certificates, says no.
        """
        await self.close()
        self._meter.reconnected()
        stream = _Stream(self)
        try:
            async with asyncio.timeout(deadline_s):
                await stream.open()
        except TimeoutError:
            await stream.close()
            raise UnreachableError(
                f"Cannot reach {self._whom}: no answer within {deadline_s:g} s.",
                remedy="Check that it runs and that its address and port can be reached from here.",
            ) from None
        except BaseException:
            await stream.close()
            raise
        self._stream = stream

    async def send(self, header: FrameHeader, payload: object, *, deadline_s: float = SEND_DEADLINE_S) -> None:
        """Hand a frame to the stream. The payload must not change before this returns.

        Frames leave in the order of the calls. Cancelling it while bytes of the frame are under way loses the link.

        Args:
            payload: anything with a contiguous buffer; it is not copied as a whole.

        Raises:
            FrameError: payload above the limit.
            UnreachableError: the link is lost, no credit came within ``deadline_s``, or too many frames wait already.
        """
        view = as_bytes_view(payload)
        if self._waiting >= self._queue_frames:
            raise self._unreachable(f"{self._waiting} frames wait already, the bound of its queue")
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline_s), self._turn:
                stream = self._stream
                if stream is None:
                    raise self._unreachable("not connected")
                probe = self._meter.wants_probe and len(view) >= PROBE_BYTES
                messages = chunks(stream.next_sequence, header, view, probe=probe)
                first = next(messages)  # refuses what is too large while nothing has left
                waited = await stream.credit()
                sequence = stream.begin(header, len(view))
                self._meter.begins(sequence, waited=waited)
                await stream.write(first)
                del first
                for message in messages:
                    if sequence not in stream.pending:  # refused by now: the receiver skips the rest
                        break
                    await stream.write(message)
                self._meter.sent(sequence)
                self._bytes_sent += len(view)
                self._frames_sent += 1
        except TimeoutError:
            raise self._unreachable(f"it took no frame within {deadline_s:g} s") from None
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """End the link; frames that are not acknowledged may be lost. Closing twice is fine."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.close()

    @property
    def _whom(self) -> str:
        return f"peer {self.peer_id} at {self.address}"

    def _unreachable(self, reason: str) -> UnreachableError:
        return UnreachableError(
            f"The link to {self._whom} carries nothing: {reason}.",
            meaning="The frame was not delivered, or nobody knows whether it was.",
            remedy="Connect again, or route around this peer.",
        )


class _Stream:
    """One connection of a link, from its window to its loss."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._channel = open_channel(link.address, link._credentials, link.peer_id, "link")
        self._call: Any = self._channel.stream_stream(METHOD)()
        self._listener: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._window_frames = self._window_bytes = self._held_bytes = 0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.pending: dict[int, tuple[FrameHeader, int]] = {}
        """Header and size of the frames that hold credit."""
        self.next_sequence = 1

    @property
    def lost_reason(self) -> str | None:
        return self.lost.result() if self.lost.done() else None

    async def open(self) -> None:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise failure(error, self._link._whom) from None
        if data is END:
            raise self._link._unreachable("the receiver is stopping")
        window = message_class("Feedback").FromString(data)
        self._window_frames, self._window_bytes = window.window_frames, window.window_bytes
        self._listener = asyncio.create_task(self._listen(), name=f"link to {self._link.peer_id}")

    async def credit(self) -> bool:
        """Wait until one more frame fits the window; whether that took any waiting."""
        waited = False
        while not self.lost.done():
            if len(self.pending) < self._window_frames and self._held_bytes < self._window_bytes:
                return waited
            waited = True
            self._changed.clear()
            await self._changed.wait()
        raise self._link._unreachable(self.lost.result())

    def begin(self, header: FrameHeader, size: int) -> int:
        sequence = self.next_sequence
        self.next_sequence += 1
        self.pending[sequence] = (header, size)
        self._held_bytes += size
        return sequence

    async def write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except asyncio.CancelledError:
            self.lose("a frame was given up half-way")
            raise
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            with contextlib.suppress(TimeoutError):  # the listener is told why
                await asyncio.wait_for(asyncio.shield(self.lost), CLOSE_DEADLINE_S)
            self.lose(str(error))
            raise self._link._unreachable(self.lost.result()) from None

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        self._changed.set()

    async def close(self) -> None:
        half_closed = False
        if self._listener is not None and not self.lost.done() and not self._link._turn.locked():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                async with asyncio.timeout(CLOSE_DEADLINE_S):
                    await self._call.done_writing()
                    half_closed = True
                    await asyncio.shield(self._listener)
        self.lose("closed" if half_closed else "closed while a frame was under way")
        self._call.cancel()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await self._channel.close()

    async def _listen(self) -> None:
        try:
            while (data := await self._call.read()) is not END:
                self._take(message_class("Feedback").FromString(data))
            self.lose("the receiver ended it")
        except asyncio.CancelledError:
            self.lose("closed")
        except DecodeError:
            self.lose("its feedback cannot be read")
        except grpc.aio.AioRpcError as error:
            self.lose(failure(error, self._link._whom).what.rstrip("."))

    def _take(self, feedback: Any) -> None:
        link = self._link
        for it in feedback.arrivals:
            if it.sequence in self.pending:
                link._frames_acked += 1
                link._meter.arrived(it.sequence, it.size, it.first_size, it.first_s, it.last_s)
        for release in feedback.releases:
            if release.sequence not in self.pending:
                continue
            header, size = self.pending.pop(release.sequence)
            self._held_bytes -= size
            link._meter.forget(release.sequence)
            if release.refusal:
                link._frames_refused += 1
                if link._on_refused is not None:
                    try:
                        link._on_refused(header, release.refusal)
                    except Exception:  # the link must not hang because its owner stumbles
                        log.exception("Telling of a refused frame failed.")
        self._changed.set()
