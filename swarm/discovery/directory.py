"""The directory of peers: publishes this peer's record, finds those of others, and keeps its daemon alive.

The daemon (a child process) is watched: when it dies it is started again with the same identity and port, joins again
and publishes again what was published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from swarm.discovery.daemon import PrivateFolder, check_port_free, ensure_identity, multiaddress
from swarm.discovery.node import Node, import_hivemind
from swarm.discovery.records import (
    CLOCK_SLACK_S,
    MAX_LIFETIME_S,
    PeerRecord,
    RecordCheck,
    RecordSeal,
    Verify,
    coordinator_key,
    peer_key,
    seal_record,
    stage_key,
)
from swarm.errors import RefusedError, SpecError, SwarmError, UnreachableError

log = logging.getLogger(__name__)

START_DEADLINE_S = 30.0
DAEMON_GRACE_S = 20.0
"""What starting the daemon may take on top of the deadline for joining."""

STORE_DEADLINE_S = 15.0
FIND_DEADLINE_S = 5.0
WITHDRAW_DEADLINE_S = 2.0
"""A peer that leaves has little time."""

STORE_PAUSE_S = 0.3
"""Between attempts to store; a node may say no because another passed it the same record a moment ago."""

REFRESH_SHARE = 1 / 3
"""A record is published again after this share of its lifetime."""

REJOIN_S = 10.0
"""How often the initial peers are greeted again: one that was started anew knows nobody."""

CLOSE_DEADLINE_S = 3.0
"""How long the background tasks may take to end."""

CACHE_S = 2.0
"""How long an answer is given again without asking."""

MAX_CACHED = 4096

MAX_RESTARTS = 5
"""Attempts to bring a dead daemon back, with growing pauses, before the directory fails for good."""

RESTART_PAUSE_S = 0.3
RESTART_JOIN_S = 10.0

RENEWAL_STEP_S = 0.001
"""Nodes keep the record that ends last, so each publication ends at least this much later than the one before."""

LOOPBACK = re.compile(r"/ip4/127\.|/ip6/::1/|/dns[46]?/localhost/")


class Directory:
    """Use :meth:`start`. All waits are bounded by the deadlines above."""

    def __init__(
        self,
        run_id: str,
        seal: RecordSeal,
        verify: Verify,
        *,
        initial_peers: Sequence[str],
        local: bool,
        listen_hosts: Sequence[str],
        announce_hosts: Sequence[str],
        port: int,
        identity_path: Path | None,
        on_failed: Callable[[SwarmError], object],
    ) -> None:
        self.run_id = run_id
        self._seal = seal
        self._check = RecordCheck(run_id, verify)
        self._initial_peers = tuple(initial_peers)
        self._local = local
        self._listen_hosts = tuple(listen_hosts) or (("127.0.0.1",) if local else ("0.0.0.0", "::"))
        self._announce_hosts = tuple(announce_hosts)
        self._port = port
        self._folder = PrivateFolder()
        self._identity_path = identity_path or self._folder.path / "dht.key"
        self._on_failed = on_failed
        self._node: Node | None = None
        self._up = asyncio.Event()
        self._addresses: list[str] = []
        self._neighbours: list[str] = []
        self._memory: object = None
        self._record: PeerRecord | None = None
        self._published = asyncio.Event()
        self._storing = asyncio.Lock()
        self._ends_at_s = 0.0
        self._cache: dict[str, tuple[float, list[PeerRecord]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @classmethod
    async def start(
        cls,
        run_id: str,
        seal: RecordSeal,
        verify: Verify,
        *,
        initial_peers: Sequence[str],
        local: bool = False,
        listen_hosts: Sequence[str] = (),
        announce_hosts: Sequence[str] = (),
        port: int = 0,
        identity_path: Path | None = None,
        on_failed: Callable[[SwarmError], object] = lambda error: None,
        deadline_s: float = START_DEADLINE_S,
    ) -> Directory:
        """Join the DHT.

        Args:
            seal: signs this peer's records.
            verify: checks those of others.
            initial_peers: multiaddresses of nodes of the DHT; one that answers suffices, none starts a new DHT.
            local: listen on loopback, and announce it.
            listen_hosts: IPv4 or IPv6 addresses to listen on instead of all, or of loopback in a local run.
            announce_hosts: addresses or names that others are told instead of those that the daemon finds.
            port: of the daemon; 0 takes a free one, and keeps it as long as this object lives.
            identity_path: file with the libp2p key, made if missing; with it and ``port`` the multiaddresses survive a
                restart of the process.
            on_failed: called once if the daemon died and could not be brought back.
            deadline_s: for joining; importing hivemind and starting the daemon come before and take 3 to 5 s.

        Raises:
            UnreachableError: no initial peer answers within ``deadline_s``, or the daemon does not start.
            ClockSkewError: the clocks differ by more than the DHT allows.
            UsageError: the port is in use.
            SpecError: the file with the key is damaged.
        """
        await asyncio.to_thread(import_hivemind)
        self = cls(
            run_id,
            seal,
            verify,
            initial_peers=initial_peers,
            local=local,
            listen_hosts=listen_hosts,
            announce_hosts=announce_hosts,
            port=port,
            identity_path=identity_path,
            on_failed=on_failed,
        )
        try:
            if port:
                check_port_free(port, self._listen_hosts[0])
            ensure_identity(self._identity_path)
            async with asyncio.timeout(deadline_s + DAEMON_GRACE_S):
                await self._open(deadline_s)
        except TimeoutError:
            await self.close()
            raise UnreachableError(
                f"The directory's daemon is not ready within {deadline_s:g} s.",
                meaning="This peer can neither find others nor be found.",
                remedy="Check the load of this machine, and start again.",
            ) from None
        except BaseException:
            await self.close()
            raise
        self._tasks = [
            asyncio.create_task(self._watch(), name="dht-daemon"),
            asyncio.create_task(self._refresh(), name="dht-records"),
            asyncio.create_task(self._rejoin(), name="dht-neighbours"),
        ]
        return self

    def addresses(self) -> list[str]:
        """Multiaddresses that others join with; loopback only in a local run."""
        return list(self._addresses)

    @property
    def daemon_pid(self) -> int:
        """Process id of the libp2p daemon; 0 while it is started again."""
        return self._node.daemon_pid if self._node is not None else 0

    async def publish(self, record: PeerRecord) -> None:
        """Store this peer's record, now and again before it expires; the one published before is forgotten.

        Raises:
            UnreachableError: no node took it within :data:`STORE_DEADLINE_S`.
            RefusedError: it is too large.
            SpecError: its lifetime is not in (0, :data:`MAX_LIFETIME_S`].
        """
        if not 0 < record.lifetime_s <= MAX_LIFETIME_S:
            raise SpecError(
                f"The lifetime of a directory entry is {record.lifetime_s:g} s, not in 0..{MAX_LIFETIME_S:g} s."
            )
        before, self._record = self._record, record
        left = set(before.dht_keys()) - set(record.dht_keys()) if before is not None else set()
        if before is not None and left:
            await self._store(replace(before, withdrawn=True), left, deadline_s=WITHDRAW_DEADLINE_S)
        stored = await self._store(record)
        self._published.set()
        if not stored:
            raise UnreachableError(
                f"The directory took no entry for {record.peer_id} within {STORE_DEADLINE_S:g} s.",
                meaning="Others could not find this peer.",
                remedy="Check the network, and that the clock of this machine is right.",
            )

    async def withdraw(self) -> None:
        """Say that this peer has left, so that others no longer find it; no error if they cannot be told in time."""
        record, self._record = self._record, None
        if record is None:
            return
        if not await self._store(replace(record, withdrawn=True), deadline_s=WITHDRAW_DEADLINE_S):
            log.info("The directory was not told that %s left; its entry expires.", record.peer_id)

    async def find_peer(self, peer_id: str) -> PeerRecord | None:
        """The record of a peer, None while there is none."""
        found = await self._find(peer_key(self.run_id, peer_id))
        return next((record for record in found if record.peer_id == peer_id), None)

    async def find_stage(self, stage: int) -> list[PeerRecord]:
        """All peers that announce ``stage``, ordered by name."""
        found = [record for record in await self._find(stage_key(self.run_id, stage)) if record.stage == stage]
        return sorted(found, key=lambda record: record.peer_id)

    async def find_coordinator(self) -> PeerRecord | None:
        """The coordinator, None while none is announced; of several the one that published last."""
        found = await self._find(coordinator_key(self.run_id))
        return max(found, key=lambda record: record.expires_at_s, default=None)

    def forget(self, peer_id: str) -> None:
        """Ask the DHT for this peer the next time, whatever was found lately."""
        self._cache.pop(peer_key(self.run_id, peer_id), None)

    async def close(self) -> None:
        """Stop the daemon; no process, socket or file of it stays behind. Closing twice is fine."""
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_DEADLINE_S)
        await self._shut()
        self._folder.remove()

    # the node

    async def _open(self, join_deadline_s: float) -> None:
        announce = [multiaddress(host, self._port) for host in self._announce_hosts] if self._port else []
        await self._shut()
        node = self._node = await Node.start(
            self._folder.path,
            self._identity_path,
            self._check,
            listen=[multiaddress(host, self._port) for host in self._listen_hosts],
            announce=announce,
            local=self._local,
        )
        if self._memory is not None:
            node.inherit(self._memory)
        self._memory = node.memory
        if not self._port and node.addresses:
            found = re.search(r"/tcp/(\d+)", node.addresses[0])
            # So that a daemon that is started again is where others look for it.
            self._port = int(found[1]) if found else 0
        if self._announce_hosts and self._port:
            told = [f"{multiaddress(host, self._port)}/p2p/{node.peer_id}" for host in self._announce_hosts]
        else:
            told = node.addresses
        self._addresses = [address for address in told if self._local or not LOOPBACK.search(address)]
        await node.join([*self._initial_peers, *self._neighbours], join_deadline_s)
        self._up.set()

    async def _shut(self) -> None:
        self._up.clear()
        node, self._node = self._node, None
        if node is not None:
            await node.stop()

    async def _watch(self) -> None:
        while self._node is not None:
            status = await self._node.ended()
            if self._closed:
                return
            self._up.clear()
            log.warning("The directory's daemon died (%d); it is started again.", status)
            reason = await self._restart()
            if reason is None:
                continue
            await self._shut()
            self._on_failed(
                UnreachableError(
                    f"The directory's daemon died and could not be brought back in {MAX_RESTARTS} attempts: {reason}",
                    meaning="Others can no longer find this peer, nor it them.",
                    remedy="Start the peer again; it continues from its state directory.",
                )
            )
            return

    async def _restart(self) -> str | None:
        """Bring the daemon back; None, or the reason why that failed."""
        reason = ""
        for attempt in range(MAX_RESTARTS):
            await asyncio.sleep(RESTART_PAUSE_S * 2**attempt)
            try:
                async with asyncio.timeout(RESTART_JOIN_S + DAEMON_GRACE_S):
                    await self._open(RESTART_JOIN_S)
            except Exception as error:  # whatever it was, the next attempt may do, and the last one is reported
                reason = str(error) or type(error).__name__
                log.info("The directory's daemon does not come back: %s", reason)
                continue
            if self._record is not None:
                await self._store(self._record)
            return None
        return reason

    async def _rejoin(self) -> None:
        while True:
            await asyncio.sleep(REJOIN_S)
            if (node := self._node) is None or not self._up.is_set():
                continue
            with contextlib.suppress(Exception):  # a dead daemon is _watch's business
                async with asyncio.timeout(FIND_DEADLINE_S):
                    self._neighbours = await node.neighbours() or self._neighbours
            await asyncio.gather(*(node.greet(address) for address in self._greeted(node)), return_exceptions=True)

    def _greeted(self, node: Node) -> list[str]:
        return [address for address in self._initial_peers if not address.endswith(f"/p2p/{node.peer_id}")]

    # records

    async def _refresh(self) -> None:
        while True:
            record = self._record
            left_s = self._ends_at_s - time.time()
            self._published.clear()
            with contextlib.suppress(TimeoutError):
                pause_s = max(left_s * REFRESH_SHARE, STORE_PAUSE_S) if record is not None else None
                # Not wait_for: it loses a cancellation that comes together with the event.
                async with asyncio.timeout(pause_s):
                    await self._published.wait()
                continue
            if record is None or record is not self._record:
                continue
            try:
                if await self._store(record):
                    continue
            except RefusedError as error:
                log.debug("not published: %s", error)
            log.warning("The directory did not take the entry of %s; it is tried again.", record.peer_id)

    async def _store(
        self, record: PeerRecord, keys: set[str] | None = None, *, deadline_s: float = STORE_DEADLINE_S
    ) -> bool:
        """Store a record, at ``keys`` or at all of its own, until nodes take it; whether they did in time."""
        keys = keys or set(record.dht_keys())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._storing:
                while not await self._store_once(record, keys):  # noqa: ASYNC110
                    await asyncio.sleep(STORE_PAUSE_S)
                return True
        return False

    async def _store_once(self, record: PeerRecord, keys: set[str]) -> bool:
        await self._up.wait()
        node = self._node
        if node is None:
            return False
        wanted_s = min(time.time() + record.lifetime_s, self._seal.expires_at_s - CLOCK_SLACK_S)
        ends_at_s = max(wanted_s, self._ends_at_s + RENEWAL_STEP_S)
        if record.withdrawn:  # only as long as what it takes the place of
            ends_at_s = self._ends_at_s + RENEWAL_STEP_S
        sealed = {key: seal_record(record, key, ends_at_s, self._seal) for key in keys}
        for key in keys:
            self._cache.pop(key, None)
        self._ends_at_s = ends_at_s
        try:
            return await node.store(sealed, record.peer_id, ends_at_s)
        except (TimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:  # hivemind's are many; all mean that it was not stored
            log.debug("store failed: %r", error)
            return False

    async def _find(self, key: str) -> list[PeerRecord]:
        now = time.monotonic()
        cached = self._cache.get(key)
        if cached is not None and now - cached[0] < CACHE_S:
            return cached[1]
        values: list[object] = []
        try:
            async with asyncio.timeout(FIND_DEADLINE_S):
                await self._up.wait()
                if self._node is not None:
                    values = await self._node.get(key)
        except Exception as error:  # hivemind's are many; all mean that nothing was found
            log.debug("find failed: %r", error)
        found: list[PeerRecord] = []
        for sealed in values:
            try:
                stored_key, record = self._check.open(sealed)
            except RefusedError as error:
                log.debug("record refused: %s", error)
                continue
            if stored_key == key and not record.withdrawn and record.expires_at_s > time.time():
                found.append(record)
        if found:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[key] = (now, found)
        return found
