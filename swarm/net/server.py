"""The server of a peer: every call of every service is authenticated here, before the service sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from swarm.errors import FrameError, RefusedError, SwarmError, UsageError
from swarm.net.addresses import Address, parse_address
from swarm.net.authority import Role
from swarm.net.channel import FAULT_KEY, MAX_FAULT_CHARACTERS, common_options, encode_fault
from swarm.net.credentials import Credentials, caller_of, check_caller

MAX_STREAMS_PER_CONNECTION = 64
"""Calls that one connection may have open at a time."""

MAX_CALLS = 4096
"""Calls that all connections together may have open at a time."""


ANY_ROLE = frozenset(Role)
"""Who may call services that do not say."""


class PeerServer:
    """A gRPC server that only talks to certified peers of its run.

    Args:
        credentials: certificate of this peer; its run is the only one that gets in.
        listen: addresses, host:port; port 0 lets the kernel choose.
        services: what is offered, one handler each with raw ``bytes`` in and out: unary-unary methods, and
            stream-stream methods that are coroutines over ``context.read()`` and ``context.write()``. A SwarmError that
            a method raises is the caller's answer. If a service has ``roles``, only certificates with one of these may
            call it; if it has a coroutine ``stop``, that ends its open streams when the server stops.
        clock: seconds since the epoch, for the expiry of certificates.
    """

    def __init__(
        self,
        credentials: Credentials,
        listen: Sequence[str],
        services: Sequence[grpc.GenericRpcHandler],
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
        server.add_generic_rpc_handlers(tuple(_Guarded(service, self._admit) for service in self._services))
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
            stop = getattr(service, "stop", None)
            if stop is not None:
                await stop()
        await self._server.stop(grace_s)

    def _admit(self, service: grpc.GenericRpcHandler, context: grpc.aio.ServicerContext) -> None:
        roles = getattr(service, "roles", ANY_ROLE)
        check_caller(caller_of(context), self._credentials.run_id, self._clock(), roles)


Admit = Callable[[grpc.GenericRpcHandler, grpc.aio.ServicerContext], None]


class _Guarded(grpc.GenericRpcHandler):
    """A service whose methods are only entered by callers that ``admit`` lets pass."""

    def __init__(self, service: grpc.GenericRpcHandler, admit: Admit) -> None:
        self._service = service
        self._admit = admit

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._service.service(handler_call_details)
        if method is None:
            return None
        if method.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._checked(method.unary_unary))
        if method.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._checked(method.stream_stream))
        raise TypeError(f"{handler_call_details.method} is neither unary-unary nor stream-stream")

    def _checked(self, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def checked(request: Any, context: grpc.aio.ServicerContext) -> bytes | None:
            try:
                self._admit(self._service, context)
                return await behaviour(request, context)
            except SwarmError as error:
                await refuse(context, error)

        return checked


async def refuse(context: grpc.aio.ServicerContext, error: SwarmError) -> NoReturn:
    """End a call with ``error``; the caller gets the same error (see ``channel.failure``)."""
    if isinstance(error, RefusedError):
        code = grpc.StatusCode.PERMISSION_DENIED
    elif isinstance(error, FrameError | UsageError):
        code = grpc.StatusCode.INVALID_ARGUMENT
    else:
        code = grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, error.what[:MAX_FAULT_CHARACTERS], ((FAULT_KEY, encode_fault(error)),))
    raise AssertionError("abort returned")
