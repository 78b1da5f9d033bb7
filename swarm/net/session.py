"""The control session: small messages in both directions between a peer and a coordinator, and proof of life.

HTTP/2 pings are answered by threads of the transport, so they say nothing about a process whose loop hangs. Therefore
both ends send heartbeats from their loop, and a session whose other end falls silent is lost, whatever TCP thinks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from swarm.errors import RefusedError, SwarmError, UnreachableError, UsageError
from swarm.net.authority import Role
from swarm.net.channel import MAX_FAULT_CHARACTERS, decode_fault, encode_fault
from swarm.net.credentials import Credentials, caller_of
from swarm.net.heartbeat import Beat, Pulse
from swarm.net.messages import message_class
from swarm.net.session_stream import METHOD, ClientEnd, ServerEnd, SessionStream

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_MESSAGE_BYTES = 2**20
MAX_QUEUED_MESSAGES = 1024
"""Messages that may wait on either side, to be sent or to be taken."""
MAX_QUEUED_BYTES = 16 * 2**20
MAX_SESSIONS_PER_PEER = 4
"""More than one while an older one is not yet known to be lost."""
FAREWELL_DEADLINE_S = 2.0
"""How long closing waits until what is queued, and the farewell, have left."""
CLOSE_DEADLINE_S = 1.0
"""How long closing waits until the other side has read what was sent."""


class Session:
    """One end of a session. Iterate over it for the messages of the other end; it ends when the session does.

    The iteration raises the SwarmError with which the other end refused the session, if it did.
    """

    def __init__(self, transport: SessionStream, peer_id: str, heartbeat_s: float) -> None:
        self.peer_id = peer_id
        """Certified id of the other end."""
        self.lost_reason: str | None = None
        """Why the session ended: ``silent for 3.2 s``, ``connection closed``, ...; None while it is open."""
        self.close_code: str | None = None
        """Code that either end gave to :meth:`close`; None while open and when the session was lost."""
        self._transport = transport
        self._heartbeat_s = heartbeat_s
        self._pulse = Pulse(heartbeat_s, time.monotonic())
        self._outbox: deque[bytes] = deque()
        self._inbox: deque[bytes] = deque()
        self._outbox_bytes = self._inbox_bytes = 0
        self._sendable, self._readable, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._last_words: bytes | None = None
        self._refusal: SwarmError | None = None
        self._greeted = False  # something came from the other end
        self._started = asyncio.Event()

    @property
    def rtt_s(self) -> float | None:
        """Quickest round trip of the last heartbeats; None before the first."""
        return self._pulse.rtt_s

    @property
    def clock_offset_s(self) -> float | None:
        """Wall clock of the other end less that of this one; None before the first round trip."""
        return self._pulse.clock_offset_s

    @property
    def timeout_s(self) -> float:
        """Silence after which the other end counts as lost."""
        return self._pulse.timeout_s

    async def send(self, message: bytes) -> None:
        """Queue a message; messages arrive in order, or the session is lost.

        Raises:
            UsageError: message above 1 MiB.
            UnreachableError: the session is over, or this message overflows its queue (which ends it).
        """
        closing = self._last_words is not None
        self.send_nowait(message)
        if closing or self.lost_reason is not None:
            raise UnreachableError(
                f"The session with peer {self.peer_id} is over: {self.lost_reason or 'it is being closed'}.",
                meaning="The message was not sent.",
                remedy="Open a new session.",
            )

    def send_nowait(self, message: bytes) -> None:
        """The same for senders that learn of the end elsewhere: a session that is over takes the message and drops it.

        Raises:
            UsageError: message above 1 MiB.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise UsageError(f"A control message has {len(message)} bytes, more than {MAX_MESSAGE_BYTES}.")
        if self.lost_reason is None and (
            len(self._outbox) >= MAX_QUEUED_MESSAGES or self._outbox_bytes + len(message) > MAX_QUEUED_BYTES
        ):
            self._end(f"{len(self._outbox)} messages wait to be sent, the other end does not take them")
        if self.lost_reason is not None or self._last_words is not None:
            return
        self._outbox.append(message)
        self._outbox_bytes += len(message)
        self._sendable.set()

    def __aiter__(self) -> Session:
        return self

    async def __anext__(self) -> bytes:
        while not self._inbox:
            if self.lost_reason is not None:
                if self._refusal is not None:
                    raise self._refusal
                raise StopAsyncIteration
            self._readable.clear()
            await self._readable.wait()
        message = self._inbox.popleft()
        self._inbox_bytes -= len(message)
        return message

    async def close(self, code: str, reason: str) -> None:
        """Send what is queued and this farewell, and end the session. Closing twice is fine."""
        envelope = message_class("Envelope")()
        envelope.close.code, envelope.close.reason = code, reason[:MAX_FAULT_CHARACTERS]
        if self.lost_reason is None:
            self.close_code = code
        await self._say_goodbye(envelope.SerializeToString(), f"closed: {reason}")

    async def refuse(self, error: SwarmError) -> None:
        """End the session with an error, which the other end's iteration raises."""
        envelope = message_class("Envelope")()
        envelope.refusal.ParseFromString(encode_fault(error))
        await self._say_goodbye(envelope.SerializeToString(), f"refused: {error.what}")

    async def wait_over(self) -> str:
        """Wait until the session has ended, however long that takes; returns :attr:`lost_reason`."""
        await self._over.wait()
        return self.lost_reason or ""

    async def _say_goodbye(self, last_words: bytes, reason: str) -> None:
        if self.lost_reason is None and self._last_words is None:
            self._last_words = last_words
            self._sendable.set()
            await asyncio.wait({self._writer}, timeout=FAREWELL_DEADLINE_S)
            self._end(reason)
        await self._reaper

    def _start(self) -> None:
        def task(job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return asyncio.create_task(job, name=f"session with {self.peer_id}")

        self._writer, self._reader, self._watcher = task(self._write()), task(self._read()), task(self._watch())
        self._reaper = task(self._reap())

    async def _reap(self) -> None:
        """When the session is over, by whatever cause, let go of everything it holds."""
        await self._over.wait()
        if self._transport.ends_between_messages:
            await asyncio.wait({self._writer}, timeout=CLOSE_DEADLINE_S)
        farewell = self._last_words is not None and self._writer.done()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                # Cancelling a read resets the stream, and the farewell with it: wait until it was read.
                if farewell and await self._transport.half_close():
                    await asyncio.wait({self._reader})
        tasks = (self._writer, self._reader, self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()

    def _end(self, reason: str) -> None:
        if self.lost_reason is None:
            self.lost_reason = reason
        for event in (self._readable, self._sendable, self._started, self._over):
            event.set()

    async def _write(self) -> None:
        kind, due_s = message_class("Envelope"), time.monotonic()
        try:
            while self.lost_reason is None:
                envelope, now_s = kind(), time.monotonic()
                if now_s >= due_s:
                    due_s = now_s + self._heartbeat_s
                    beat = self._pulse.beat(now_s, time.time())
                    envelope.heartbeat.wall_s, envelope.heartbeat.stamp_s = beat.wall_s, beat.stamp_s
                    envelope.heartbeat.echo_s, envelope.heartbeat.held_s = beat.echo_s, beat.held_s
                elif self._outbox:
                    envelope.message = self._outbox.popleft()
                    self._outbox_bytes -= len(envelope.message)
                elif self._last_words is not None:
                    await self._transport.write(self._last_words)
                    return
                else:
                    self._sendable.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._sendable.wait(), due_s - now_s)
                    continue
                await self._transport.write(envelope.SerializeToString())
        except UnreachableError:
            with contextlib.suppress(TimeoutError):  # the reader learns why
                await asyncio.wait_for(self._over.wait(), CLOSE_DEADLINE_S)
            self._end("connection closed")

    async def _read(self) -> None:
        kind = message_class("Envelope")
        try:
            while (data := await self._transport.read()) is not None:
                self._take(kind.FromString(data), time.monotonic())
            self._end("connection closed")
        except DecodeError:
            self._end("the other end sent what is not a session message")
        except SwarmError as error:
            if isinstance(error, UnreachableError) and self._greeted:
                self._end("connection closed")
                return
            if self.lost_reason is None:
                self._refusal = error
            self._end(error.what.rstrip("."))

    def _take(self, envelope: Any, now_s: float) -> None:
        self._pulse.heard(now_s)
        self._greeted = True
        self._started.set()
        match envelope.WhichOneof("content"):
            case "message":
                self._inbox.append(envelope.message)
                self._inbox_bytes += len(envelope.message)
                self._readable.set()
                if len(self._inbox) > MAX_QUEUED_MESSAGES or self._inbox_bytes > MAX_QUEUED_BYTES:
                    self._end(f"{len(self._inbox)} messages came that this end did not take")
            case "heartbeat":
                it = envelope.heartbeat
                self._pulse.take(Beat(it.wall_s, it.stamp_s, it.echo_s, it.held_s), now_s, time.time())
            case "close":
                if self.lost_reason is None:
                    self.close_code = envelope.close.code
                self._end(f"closed by the other end: {envelope.close.reason}")
            case "refusal":
                self._refusal = decode_fault(envelope.refusal.SerializeToString())
                self._end(f"refused: {self._refusal.what}")

    async def _watch(self) -> None:
        while self.lost_reason is None:
            silence_s = self._pulse.silence_s(time.monotonic())
            if silence_s > self._pulse.timeout_s:
                self._end(f"silent for {silence_s:.1f} s")
            await asyncio.sleep(self._heartbeat_s / 4)


class SessionService(grpc.GenericRpcHandler):
    """The coordinator's side.

    Args:
        on_session: runs as long as the session; when it returns, the session is closed, and when it raises SwarmError,
            the peer is refused with that error.
        heartbeat_s: interval of heartbeats, the same on both sides.
    """

    roles = frozenset({Role.PEER})

    def __init__(self, on_session: Callable[[Session], Awaitable[None]], *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._on_session = on_session
        self._heartbeat_s = heartbeat_s
        self._sessions: set[Session] = set()
        self._serving: set[asyncio.Task[None]] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(self._open)

    async def stop(self) -> None:
        """Close all sessions."""
        await asyncio.gather(*(session.close("stopping", "the coordinator stops") for session in self._sessions))
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSE_DEADLINE_S)

    async def _open(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        caller = caller_of(context)
        await context.send_initial_metadata(())
        if sum(session.peer_id == caller.peer_id for session in self._sessions) >= MAX_SESSIONS_PER_PEER:
            raise RefusedError(
                f"Peer {caller.peer_id} has {MAX_SESSIONS_PER_PEER} sessions already.",
                remedy="Close them, or wait until they are found lost.",
            )
        session = Session(ServerEnd(context), caller.peer_id, self._heartbeat_s)
        session._start()
        self._sessions.add(session)
        serving = asyncio.create_task(self._serve(session), name=f"session of {caller.peer_id}")
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        try:
            # The coordinator's part is a task of its own: the transport cancels this one, that one sees the end.
            await session.wait_over()
            await asyncio.wait({serving, session._reaper}, timeout=2 * CLOSE_DEADLINE_S)
        except asyncio.CancelledError:
            session._end("connection closed")
            raise
        finally:
            self._sessions.discard(session)

    async def _serve(self, session: Session) -> None:
        try:
            await self._on_session(session)
        except SwarmError as error:
            await session.refuse(error)
        except Exception:
            log.exception("The session of peer %s failed.", session.peer_id)
            await session.close("failed", "the coordinator failed at it; its log says why")
        else:
            await session.close("done", "the coordinator has nothing more to say")


async def open_session(
    address: str, credentials: Credentials, peer_id: str, deadline_s: float, *, heartbeat_s: float = HEARTBEAT_S
) -> Session:
    """Open a session with the coordinator ``peer_id`` at ``address``; returns when it has answered.

    Raises:
        UnreachableError: no answer within ``deadline_s``.
        SwarmError: the coordinator refused, with the error it gave.
    """
    end = ClientEnd(address, credentials, peer_id)
    session = Session(end, peer_id, heartbeat_s)
    session._start()
    reason = f"no answer within {deadline_s:g} s"
    try:
        async with asyncio.timeout(deadline_s):
            await session._started.wait()
        reason = session.lost_reason or ""
    except TimeoutError:
        pass
    finally:
        if not session._greeted:
            session._end(reason)
            await session._reaper
    if session._refusal is not None:
        raise session._refusal
    if not session._greeted:
        raise UnreachableError(
            f"Cannot reach {end.whom}: {reason}.",
            remedy="Check that it runs and that its address and port can be reached from here.",
        )
    return session
