"""The two ends of the gRPC stream under a control session, as one interface."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc

from swarm.errors import UnreachableError
from swarm.net.channel import END, failure, open_channel
from swarm.net.credentials import Credentials

METHOD = "/swarm.v1.Session/Open"


class SessionStream(Protocol):
    """One end of the stream; ``read`` returns None at its end, both raise SwarmError when it broke."""

    @property
    def ends_between_messages(self) -> bool:
        """A message that is being written must not be given up, or the stream does not end properly."""
        ...

    async def read(self) -> bytes | None: ...
    async def write(self, data: bytes) -> None: ...

    async def half_close(self) -> bool:
        """Nothing more will be written; whether the other side ends the stream when it has read everything."""
        ...

    async def close(self) -> None: ...


class ServerEnd:
    """The stream as its server sees it."""

    ends_between_messages = True

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context: Any = context

    async def read(self) -> bytes | None:
        try:
            data = await self._context.read()
        except grpc.aio.BaseError:
            return None
        return None if data is END else data

    async def write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except grpc.aio.BaseError:
            raise UnreachableError("connection closed") from None

    async def half_close(self) -> bool:
        return False  # the call ends when its behaviour returns, after what was written

    async def close(self) -> None:
        pass


class ClientEnd:
    """The stream as its client sees it, on a connection of its own."""

    ends_between_messages = False

    def __init__(self, address: str, credentials: Credentials, peer_id: str) -> None:
        self.whom = f"peer {peer_id} at {address}"
        self._channel = open_channel(address, credentials, peer_id, "session")
        self._call: Any = self._channel.stream_stream(METHOD)()

    async def read(self) -> bytes | None:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise failure(error, self.whom) from None
        return None if data is END else data

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise UnreachableError("connection closed") from None

    async def half_close(self) -> bool:
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()
