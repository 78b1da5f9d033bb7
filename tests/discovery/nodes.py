"""Nodes of a directory on loopback, and a wait that has a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from swarm.discovery import Directory, PeerRecord
from swarm.net.authority import Role
from tests.net.certified import RUN_ID, member


async def start(name: str, *initial: Directory | str, role: Role = Role.PEER, **options) -> Directory:
    """The directory of the member ``name``, joined through ``initial`` (directories or multiaddresses)."""
    credentials = member(name, role)
    peers = [address for one in initial for address in ([one] if isinstance(one, str) else one.addresses())]
    return await Directory.start(
        RUN_ID, credentials, credentials.verify_record, initial_peers=peers, local=True, **options
    )


def record(name: str, stage: int | None = 0, *, lifetime_s: float = 60.0, role: Role = Role.PEER) -> PeerRecord:
    """What ``name`` publishes."""
    kind = "coordinator" if role is Role.BOOTSTRAP else "peer"
    return PeerRecord(RUN_ID, member(name, role).peer_id, stage, kind, (f"{name}.example:7000",), lifetime_s)


def said(found: PeerRecord | None) -> PeerRecord | None:
    """What was found without when it ends, comparable to :func:`record`."""
    return None if found is None else replace(found, expires_at_s=0.0, lifetime_s=60.0)


async def eventually(condition: Callable[[], Awaitable[bool]], deadline_s: float) -> float:
    """Ask until it is so; returns the seconds that took, TimeoutError if it takes longer."""
    began = time.monotonic()
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return time.monotonic() - began
