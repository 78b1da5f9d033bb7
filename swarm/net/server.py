"""The server of a peer: every call of every service is authenticated here, before the service sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import grpc

from swarm.errors import FrameError, RefusedError, SwarmError, UsageError
from swarm.net.addresses import Address, parse_address
from swarm.net.channel import FAULT_KEY, MAX_FAULT_CHARACTERS, common_options, encode_fault
from swarm.net.credentials import Caller, Credentials, caller_of, check_caller

log = logging.getLogger(__name__)

MAX_STREAMS_PER_CONNECTION = 64
"""Calls that one connection may have open at a time."""

MAX_CALLS = 4096
"""Calls that all connections together may have open at a time."""

Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """One request, one reply, both ``bytes``. A SwarmError raised is the caller's answer."""

    behaviour: Callable[[bytes, Caller, Context], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """A stream of ``bytes`` in each direction, through ``context.read()`` and ``context.write()``."""

    behaviour: Callable[[Caller, Context], Awaitable[None]]


class Service(Protocol):
    """What a :class:`PeerServer` offers."""

    @property
    def name(self) -> str:
        """Full name, as in ``swarm.v1.Pipeline``."""
        ...

    @property
    def roles(self) -> frozenset[str]:
        """Roles of certificates that may call it."""
        ...

    def methods(self) -> Mapping[str, UnaryMethod | StreamMethod]: ...

    async def stop(self) -> None:
        """End the open streams, saying why, before the server closes."""
        ...


class PeerServer:
    """A gRPC server that only talks to certified peers of its run.

    Args:
        credentials: certificate of this peer; its run is the only one that gets in.
        listen: addresses, host:port; port 0 lets the kernel choose.
        services: what is offered.
        clock: seconds since the epoch, for the expiry of certificates.
    """

    def __init__(
        self,
        credentials: Credentials,
        listen: Sequence[str],
        services: Sequence[Service],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._credentials = credentials
        self._listen = [parse_address(text) for text in listen]
        self._services = tuple(services)
        self._clock = clock
        self._server: grpc.aio.Server | None = None
        self._stopped = False

    async def start(self) -> list[str]:
        """Listen, and return the addresses with the ports in use.

        Raises:
            UsageError: a port is taken, or an address is not of this machine.
        """
        server = grpc.aio.server(
            options=[
                *common_options(),
                ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
                ("grpc.so_reuseport", 0),  # else two servers share a port in silence
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        for service in self._services:
            handlers = {name: self._guarded(service, method) for name, method in service.methods().items()}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.name, handlers),))
        bound: list[str] = []
        for address in self._listen:
            try:
                port = server.add_secure_port(str(address), self._credentials.server_credentials())
            except RuntimeError:
                port = 0
            if not port:
                await server.stop(None)
                raise UsageError(
                    f"Cannot listen on {address}: port {address.port} is in use, or the host is not this machine.",
                    meaning="Other peers could not reach this one.",
                    remedy="Choose another port; port 0 takes a free one.",
                )
            bound.append(str(Address(address.host, port)))
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float) -> None:
        """Let the services end their streams, then close; calls still open after ``grace_s`` are cancelled."""
        if self._server is None or self._stopped:
            return
        self._stopped = True
        for service in self._services:
            await service.stop()
        await self._server.stop(grace_s)

    def _guarded(self, service: Service, method: UnaryMethod | StreamMethod) -> grpc.RpcMethodHandler:
        if isinstance(method, UnaryMethod):
            answer = method.behaviour

            async def unary(request: bytes, context: Context) -> bytes:
                try:
                    return await answer(request, self._admit(service, context), context)
                except SwarmError as error:
                    await refuse(context, error)

            return grpc.unary_unary_rpc_method_handler(unary)
        stream = method.behaviour

        async def streaming(_requests: object, context: Context) -> None:
            try:
                await stream(self._admit(service, context), context)
            except SwarmError as error:
                await refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(streaming)

    def _admit(self, service: Service, context: Context) -> Caller:
        caller = caller_of(context)
        check_caller(caller, self._credentials.run_id, self._clock(), service.roles)
        return caller


async def refuse(context: Context, error: SwarmError) -> NoReturn:
    """End a call with ``error``; the caller gets the same error (see ``channel.failure``)."""
    if isinstance(error, RefusedError):
        code = grpc.StatusCode.PERMISSION_DENIED
    elif isinstance(error, FrameError | UsageError):
        code = grpc.StatusCode.INVALID_ARGUMENT
    else:
        code = grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, error.what[:MAX_FAULT_CHARACTERS], ((FAULT_KEY, encode_fault(error)),))
    raise AssertionError("abort returned")
