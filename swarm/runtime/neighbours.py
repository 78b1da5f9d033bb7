"""The outgoing links of a peer: to the stage before and to the stage after its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarm.config.spec import RunSpec
from swarm.core.frame import FrameHeader, FrameKind
from swarm.core.messages import LinkReport
from swarm.core.view import View
from swarm.errors import SwarmError, UnreachableError
from swarm.net.credentials import Credentials
from swarm.net.link import Link

OUTGOING_LIMIT = 1024
"""Frames that may wait for one link. The head's limit of microbatches in flight keeps it far below."""

CONNECT_DEADLINE_S = 10.0
"""For the connection to a neighbour whose address is known."""

FIRST_WARNING_S = 5.0
WARN_EVERY_S = 30.0
"""People are told of a neighbour that cannot be reached after the first of these, and then this often."""

RETRY_S = 0.5
"""Between two attempts to find or reach a neighbour while a view is installed."""


@dataclass(slots=True)
class _Neighbour:
    peer_id: str
    stage: int
    link: Link
    addresses: tuple[str, ...]
    outgoing: asyncio.Queue[tuple[FrameHeader, memoryview]] = field(
        default_factory=lambda: asyncio.Queue(OUTGOING_LIMIT)
    )
    tasks: tuple[asyncio.Task[None], ...] = ()
    training_bytes: int = 0
    training_tokens: int = 0
    rank: int = 0
    dtype: str = ""
    lost: bool = False

    @property
    def usable(self) -> bool:
        return not self.lost and self.link.lost_reason is None


class Neighbours:
    """Keeps one link to each neighbour of the view, and sends frames in the order they are given.

    Args:
        find: the addresses of a peer, from the directory; empty while unknown.
        on_lost: called once with (peer id, reason) when a link fails.
        on_refused: called with (peer id, reason) when a neighbour refuses a frame.
        on_unreachable: called with (stage, peer id, reason) now and then while a neighbour cannot be reached.
    """

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        credentials: Credentials,
        *,
        find: Callable[[str], Awaitable[tuple[str, ...]]],
        on_lost: Callable[[str, str], None],
        on_refused: Callable[[str, str], None],
        on_unreachable: Callable[[int, str, str], None] = lambda stage, peer_id, reason: None,
    ) -> None:
        self.spec = spec
        self.stage = stage
        self._credentials = credentials
        self._find = find
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._on_unreachable = on_unreachable
        self._by_stage: dict[int, _Neighbour] = {}

    async def connect(self, view: View) -> None:
        """Have a link to every neighbour of ``view``; waits until they can be reached, and is ended by cancelling."""
        stages = [stage for stage in (self.stage - 1, self.stage + 1) if 0 <= stage < self.spec.model.stages]
        await asyncio.gather(*(self._connect_stage(stage, view.peer_of(stage)) for stage in stages))

    def send(self, target_stage: int, header: FrameHeader, payload: memoryview) -> None:
        """Queue a frame; it is dropped if the link is lost (the next view repeats it)."""
        neighbour = self._by_stage.get(target_stage)
        if neighbour is None or neighbour.lost:
            return
        try:
            neighbour.outgoing.put_nowait((header, payload))
        except asyncio.QueueFull:
            self._lose(neighbour, f"{OUTGOING_LIMIT} frames wait for it")

    def reports(self) -> list[LinkReport]:
        """What is known of each link."""
        reports: list[LinkReport] = []
        for neighbour in self._by_stage.values():
            stats = neighbour.link.stats
            tokens = neighbour.training_tokens
            reports.append(
                LinkReport(
                    target_peer=neighbour.peer_id,
                    source_stage=self.stage,
                    target_stage=neighbour.stage,
                    goodput_bytes_s=-1.0 if stats.goodput_bytes_s is None else stats.goodput_bytes_s,
                    rtt_s=-1.0 if stats.rtt_s is None else stats.rtt_s,
                    rank=neighbour.rank,
                    dtype=neighbour.dtype,
                    bytes_per_token=neighbour.training_bytes / tokens if tokens else 0.0,
                    queued_frames=stats.queued_frames + neighbour.outgoing.qsize(),
                )
            )
        return reports

    @property
    def rtt_s(self) -> float:
        """The largest known round trip, 0 while none is known."""
        return max((n.link.stats.rtt_s or 0.0 for n in self._by_stage.values()), default=0.0)

    async def close(self) -> None:
        for stage in list(self._by_stage):
            await self._drop(stage)

    async def _connect_stage(self, stage: int, peer_id: str) -> None:
        current = self._by_stage.get(stage)
        if current is not None and current.peer_id == peer_id and current.usable:
            addresses = await self._find(peer_id)
            if (not addresses or addresses == current.addresses) and current.usable:
                # Frames of older views would only be refused.
                while not current.outgoing.empty():
                    current.outgoing.get_nowait()
                return
        await self._drop(stage)
        loop = asyncio.get_running_loop()
        reason, warn_at_s = "the directory has no address of it", loop.time() + FIRST_WARNING_S
        while True:
            if loop.time() > warn_at_s:
                self._on_unreachable(stage, peer_id, reason)
                warn_at_s = loop.time() + WARN_EVERY_S
            addresses = await self._find(peer_id)
            for address in addresses:
                link = Link(
                    address,
                    self._credentials,
                    peer_id,
                    on_refused=lambda _header, text: self._on_refused(peer_id, text),
                )
                try:
                    await link.connect(CONNECT_DEADLINE_S)
                except SwarmError as error:
                    reason = error.what
                    await link.close()
                    continue
                neighbour = _Neighbour(peer_id, stage, link, addresses)
                neighbour.tasks = (
                    asyncio.create_task(self._pump(neighbour), name=f"link-to-stage-{stage}"),
                    asyncio.create_task(self._watch(neighbour), name=f"loss-of-link-to-stage-{stage}"),
                )
                self._by_stage[stage] = neighbour
                return
            await asyncio.sleep(RETRY_S)

    async def _pump(self, neighbour: _Neighbour) -> None:
        try:
            while True:
                header, payload = await neighbour.outgoing.get()
                await neighbour.link.send(header, payload)
                if header.kind is not FrameKind.EVALUATION and not header.attempt:
                    neighbour.training_bytes += len(payload)
                    neighbour.training_tokens += header.batch * header.time
                    neighbour.rank, neighbour.dtype = header.rank, header.dtype.value
        except UnreachableError as error:
            self._lose(neighbour, error.what)

    async def _watch(self, neighbour: _Neighbour) -> None:
        # Frames under way are lost with the link, and there may be no other that would show it.
        self._lose(neighbour, await neighbour.link.wait_lost())

    def _lose(self, neighbour: _Neighbour, reason: str) -> None:
        if not neighbour.lost:
            neighbour.lost = True
            self._on_lost(neighbour.peer_id, reason)

    async def _drop(self, stage: int) -> None:
        neighbour = self._by_stage.pop(stage, None)
        if neighbour is None:
            return
        neighbour.lost = True
        for task in neighbour.tasks:
            task.cancel()
        await asyncio.gather(*neighbour.tasks, return_exceptions=True)
        await neighbour.link.close()
