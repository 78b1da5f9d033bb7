"""Channels: one connection each, and what a failed call means."""

import asyncio
import time

import grpc
import pytest

from swarm.errors import CheckpointError, RefusedError, SwarmError, UnreachableError, UsageError
from swarm.net.channel import FAULT_KEY, decode_fault, encode_fault, failure, open_channel
from swarm.net.frames import BrokenStreamError
from tests.net.certified import member
from tests.net.test_server import echo_server


def failed(code: grpc.StatusCode, details: str, *metadata: tuple[str, bytes]) -> SwarmError:
    none = grpc.aio.Metadata()
    return failure(grpc.aio.AioRpcError(code, none, grpc.aio.Metadata(*metadata), details), "peer bob")


def test_the_error_of_the_other_side_comes_through():
    error = failed(
        grpc.StatusCode.UNKNOWN, "?", (FAULT_KEY, encode_fault(CheckpointError("a", meaning="b", remedy="c")))
    )
    assert type(error) is CheckpointError
    assert str(error) == "a b c"


@pytest.mark.parametrize("error", [RefusedError("a"), BrokenStreamError("a"), SwarmError("a", remedy="b" * 999)])
def test_faults_survive_the_wire(error):
    assert type(decode_fault(encode_fault(error))) is type(error)
    assert decode_fault(encode_fault(error)).as_dict() == error.as_dict()


def test_unknown_and_unreadable_faults_are_refusals():
    assert type(decode_fault(b"\xff")) is RefusedError
    assert type(decode_fault(encode_fault(RefusedError("a")).replace(b"refused", b"unknown"))) is RefusedError


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection refused", UnreachableError, "Connection refused"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline", UnreachableError, "no answer in time"),
        (grpc.StatusCode.UNAVAILABLE, "last error: Socket closed", UnreachableError, "may not accept the certificate"),
        (grpc.StatusCode.UNAVAILABLE, "Hostname Verification Check failed", RefusedError, "certificates"),
        (grpc.StatusCode.UNAVAILABLE, "Tls handshake failed", RefusedError, "certificates"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", RefusedError, "does not offer"),
        (grpc.StatusCode.PERMISSION_DENIED, "go away", RefusedError, "go away"),
    ],
)
def test_codes_of_grpc_become_errors_of_the_run(code, details, kind, text):
    error = failed(code, details)
    assert type(error) is kind
    assert "peer bob" in error.what
    assert text in str(error)


def test_what_is_no_address_is_refused_at_once():
    with pytest.raises(UsageError):
        open_channel("nowhere", member("alice"), member("bob").peer_id, "test")


@pytest.mark.asyncio(loop_scope="session")  # grpc.aio wants one loop in a process
async def test_a_small_call_does_not_queue_behind_bulk_of_another_channel():
    async with echo_server() as address:
        bulk = open_channel(address, member("alice"), member("bob").peer_id, "link")
        control = open_channel(address, member("alice"), member("bob").peer_id, "session")
        stream = bulk.stream_stream("/test.Echo/Stream")()

        async def fill() -> None:
            while True:  # nobody reads what comes back, so the stream ends up stuck
                await stream.write(bytes(2**20))

        filling = asyncio.create_task(fill())
        began = time.monotonic()
        for _ in range(20):
            assert await control.unary_unary("/test.Echo/Unary")(b"x", timeout=5.0) == b"x"
        assert time.monotonic() - began < 5.0
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        await asyncio.gather(bulk.close(), control.close())
