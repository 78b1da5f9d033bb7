"""Frames over mutually authenticated TLS on loopback, against a bare gRPC stream of the same bytes in the same run.

Sender and receiver are two processes. Run it as ``python -m tests.bench.frames``; it prints one JSON line for each
frame size and, last, one with the figures of the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time

import grpc
import uvloop

from swarm.config.spec import WireDtype
from swarm.core.frame import FrameHeader, FrameKind
from swarm.net.channel import open_channel
from swarm.net.credentials import Credentials
from swarm.net.link import Link, PipelineService
from swarm.net.server import PeerServer
from tests.net.certified import member
from tests.net.far_end import credentials_fields, credentials_from

MIB = 2**20
SIZES = (8 * 1024, 128 * 1024, 1000 * 1024, MIB, 4 * MIB, 64 * MIB)
HEADER = FrameHeader("ab" * 16, 1, 1, 0, FrameKind.ACTIVATION, 0, 1, 8, WireDtype.BF16, 4, 128, ("a" * 20,) * 3)
RAW = "/bench.Raw/Go"


class RawService(grpc.GenericRpcHandler):
    """Reads what comes, then says how much that was."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._go) if handler_call_details.method == RAW else None

    async def _go(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        size = 0
        while (data := await context.read()) is not grpc.aio.EOF:
            size += len(data)
        await context.write(str(size).encode())


async def serve() -> None:
    credentials = credentials_from(json.loads(sys.stdin.readline()))
    services = [PipelineService(lambda sender, header, payload: None), RawService()]
    server = PeerServer(credentials, ["127.0.0.1:0"], services)
    print((await server.start())[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(1.0)


async def framed(address: str, alice: Credentials, bob: str, size: int, count: int) -> tuple[float, Link]:
    """Seconds from the first frame's sending to the last one's acknowledgement."""
    link, payload = Link(address, alice, bob), memoryview(bytes(size))
    await link.connect(10)
    began = time.perf_counter()
    for _ in range(count):
        await link.send(HEADER, payload)
    while link.stats.frames_acked < count:  # noqa: ASYNC110
        await asyncio.sleep(0.0002)
    seconds = time.perf_counter() - began
    await link.close()
    return seconds, link


async def raw(address: str, alice: Credentials, bob: str, size: int, count: int) -> float:
    """The same bytes in messages of the same size, without frames, credit and acknowledgements."""
    channel = open_channel(address, alice, bob, "bench")
    call = channel.stream_stream(RAW)()
    message = bytes(min(size, MIB))
    await call.wait_for_connection()
    began = time.perf_counter()
    for _ in range(count * size // len(message)):
        await call.write(message)
    await call.done_writing()
    assert int(await call.read()) == count * size // len(message) * len(message)
    seconds = time.perf_counter() - began
    await channel.close()
    return seconds


async def measure(address: str, size: int, rounds: int) -> dict[str, float | int | None]:
    alice, bob = member("alice"), member("bob").peer_id
    count = max(3, min(2000, 192 * MIB // size))
    links, raws = [], []
    for _ in range(rounds):
        seconds, link = await framed(address, alice, bob, size, count)
        links.append(count * size / seconds / 1e6)
        raws.append(count * size / await raw(address, alice, bob, size, count) / 1e6)
    stats, link_mb_s, raw_mb_s = link.stats, statistics.median(links), statistics.median(raws)
    return {
        "frame_bytes": size,
        "frames": count,
        "link_mb_s": round(link_mb_s, 1),
        "link_frames_s": round(link_mb_s * 1e6 / size),
        "raw_mb_s": round(raw_mb_s, 1),
        "share_of_raw": round(link_mb_s / raw_mb_s, 3),
        "goodput_mb_s": round(stats.goodput_bytes_s / 1e6, 1) if stats.goodput_bytes_s else None,
        "rtt_ms": round(stats.rtt_s * 1e3, 3) if stats.rtt_s else None,
    }


async def main(rounds: int) -> None:
    receiver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.frames", "--serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    receiver.stdin.write(json.dumps(credentials_fields(member("bob"))).encode() + b"\n")
    address = (await asyncio.wait_for(receiver.stdout.readline(), 60)).decode().strip()
    for size in SIZES:
        row = await measure(address, size, rounds)
        print(json.dumps({"event": "frames", **row}), flush=True)
    print(json.dumps({"event": "result", **row}))
    receiver.stdin.close()
    await receiver.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements a size, of which the median counts")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    uvloop.run(serve() if arguments.serve else main(arguments.rounds))
