"""The receiving end of links: frames in, feedback out, and a bound on what any sender can make this peer hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from swarm.core.frame import FrameHeader
from swarm.errors import FrameError, SwarmError
from swarm.net.authority import Role
from swarm.net.channel import END, MAX_FAULT_CHARACTERS
from swarm.net.credentials import caller_of
from swarm.net.frames import Assembler, BrokenStreamError, Frame, refusal
from swarm.net.messages import message_class

log = logging.getLogger(__name__)

METHOD = "/swarm.v1.Pipeline/Frames"

WINDOW_FRAMES = 32
"""Frames of one sender that may be arriving or worked on."""

WINDOW_BYTES = 64 * 2**20
"""Their payload bytes; the last frame that begins within the window may exceed it, for a larger one must pass too."""

MAX_REFUSALS_IN_A_ROW = 16
"""A sender of which so many frames in a row are refused is disconnected."""

CLOSE_DEADLINE_S = 1.0
"""How long the last feedback may take when the sender has finished."""

OnFrame = Callable[[str, FrameHeader, memoryview], Awaitable[None] | None]
Guard = Callable[[str, FrameHeader, int], None]


class PipelineService(grpc.GenericRpcHandler):
    """Receives the frames of all links to this peer.

    One stream per sender: when a sender connects again, its older stream ends.

    Args:
        on_frame: called in the loop with (sender's peer id, header, payload) of each complete frame, in the order of
            the sender. Credit goes back when it returns None, or when the awaitable it returns is done. FrameError,
            from either, refuses the frame. ``payload`` may be read-only.
        guard: called with (sender's peer id, header, payload size in bytes) before memory is taken; raises FrameError.
        run_id: refuse frames of other runs, also before memory is taken.
        clock: monotonic seconds.
    """

    roles = frozenset({Role.PEER})

    def __init__(
        self,
        on_frame: OnFrame,
        guard: Guard | None = None,
        *,
        run_id: str | None = None,
        window_frames: int = WINDOW_FRAMES,
        window_bytes: int = WINDOW_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_frame = on_frame
        self.guard = guard
        self.run_id = run_id
        self.window_frames = window_frames
        self.window_bytes = window_bytes
        self.clock = clock
        self.refusals: Counter[str] = Counter()
        """Frames refused so far, by the peer id of the sender."""
        self._inbound: dict[str, _Inbound] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(self._frames)

    async def stop(self) -> None:
        for inbound in self._inbound.values():
            inbound.end()

    async def _frames(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        caller = caller_of(context)
        older = self._inbound.get(caller.peer_id)
        if older is not None:
            older.end()
        inbound = self._inbound[caller.peer_id] = _Inbound(self, caller.peer_id, context)
        try:
            await inbound.run()
        finally:
            if self._inbound.get(caller.peer_id) is inbound:
                del self._inbound[caller.peer_id]


class _Inbound:
    """One stream of one sender."""

    def __init__(self, service: PipelineService, sender: str, context: grpc.aio.ServicerContext) -> None:
        self._service = service
        self._sender = sender
        self._context = context
        self._assembler = Assembler(self._guard)
        self._held: dict[int, int] = {}  # payload bytes of the frames that hold credit
        self._refused_in_a_row = 0
        self._work: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news, self._over = asyncio.Event(), asyncio.Event()
        self._feedback: Any = message_class("Feedback")(
            window_frames=service.window_frames, window_bytes=service.window_bytes
        )

    def end(self, error: SwarmError | None = None) -> None:
        """End the stream: for the sender it is over, with ``error`` if one is given."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def run(self) -> None:
        """Until the sender has finished, or the stream has to end.

        Raises:
            FrameError: why it has to.
        """
        await self._context.send_initial_metadata(())
        receiving = asyncio.create_task(self._receive(), name=f"frames of {self._sender}")
        reporting = asyncio.create_task(self._report(), name=f"feedback to {self._sender}")
        try:
            await asyncio.wait({receiving, reporting, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            # What the sender has not been told yet is told now. gRPC needs this, too: a stream cannot end properly
            # while a message is being written.
            self._over.set()
            self._news.set()
            await asyncio.wait({reporting}, timeout=CLOSE_DEADLINE_S)
            for task in (receiving, self._ended):
                if task.done():
                    task.result()
        finally:
            self.end()
            self._ended.exception()  # it was raised above, or something else was
            for task in (receiving, reporting):
                task.cancel()
            await asyncio.gather(receiving, reporting, return_exceptions=True)

    async def _receive(self) -> None:
        assembler, clock, first_s = self._assembler, self._service.clock, 0.0
        while (message := await self._context.read()) is not END:
            now_s, before = clock(), assembler.sequence
            try:
                frame = assembler.feed(message)
            except BrokenStreamError as error:
                self._charge(error.what)
                raise
            except FrameError as error:
                self._release(assembler.sequence, error.what)
                continue
            if assembler.sequence != before:
                first_s = now_s
            if frame is not None:
                self._complete(frame, first_s, now_s)
            del message, frame  # or they stay in memory until the next one comes

    def _guard(self, sequence: int, header: FrameHeader, size: int) -> None:
        service = self._service
        if len(self._held) >= service.window_frames or sum(self._held.values()) >= service.window_bytes:
            raise BrokenStreamError(
                f"Frame {sequence} came without credit: {len(self._held)} frames are being worked on.",
                remedy="Sender and receiver run different versions, or the sender ignores the window.",
            )
        if service.run_id is not None and header.run_id != service.run_id:
            raise refusal(f"its run id is {header.run_id!r}, and this peer expects {service.run_id!r}")
        if service.guard is not None:
            service.guard(self._sender, header, size)
        self._held[sequence] = size

    def _complete(self, frame: Frame, first_s: float, last_s: float) -> None:
        self._feedback.arrivals.add(
            sequence=frame.sequence,
            size=len(frame.payload),
            first_size=self._assembler.first_size,
            first_s=first_s,
            last_s=last_s,
        )
        self._news.set()
        try:
            work = self._service.on_frame(self._sender, frame.header, frame.payload)
        except FrameError as error:
            self._release(frame.sequence, error.what)
        except Exception:
            self._failed(frame.sequence)
        else:
            if work is None:
                self._release(frame.sequence)
            else:
                task = asyncio.ensure_future(self._finish(frame.sequence, work))
                self._work.add(task)
                task.add_done_callback(self._work.discard)

    async def _finish(self, sequence: int, work: Awaitable[None]) -> None:
        try:
            await work
        except FrameError as error:
            self._release(sequence, error.what)
        except Exception:
            self._failed(sequence)
        else:
            self._release(sequence)

    def _failed(self, sequence: int) -> None:
        log.exception("The work on frame %d of peer %s failed.", sequence, self._sender)
        self._release(sequence, "The receiver failed at it; its log says why.")

    def _release(self, sequence: int, refusal: str = "") -> None:
        self._held.pop(sequence, None)
        self._feedback.releases.add(sequence=sequence, refusal=refusal[:MAX_FAULT_CHARACTERS])
        self._news.set()
        if not refusal:
            self._refused_in_a_row = 0
        else:
            self._charge(refusal)
        if len(self._feedback.releases) > 4 * self._service.window_frames:
            self.end(FrameError(f"Peer {self._sender} does not read what it is told about its frames."))

    def _charge(self, refusal: str) -> None:
        self._service.refusals[self._sender] += 1
        log.warning("Refused a frame of peer %s: %s", self._sender, refusal)
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSALS_IN_A_ROW:
            self.end(
                FrameError(
                    f"{self._refused_in_a_row} frames in a row were refused, the last because: {refusal}",
                    meaning="The receiver closed the link.",
                    remedy="Sender and receiver run different versions or run specs: compare them.",
                )
            )

    async def _report(self) -> None:
        kind = message_class("Feedback")
        with contextlib.suppress(grpc.aio.BaseError):
            while True:
                self._news.clear()
                feedback, self._feedback = self._feedback, kind()
                if feedback.ByteSize():
                    await self._context.write(feedback.SerializeToString())
                elif self._over.is_set():
                    return
                else:
                    await self._news.wait()
