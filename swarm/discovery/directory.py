"""A node of the run's DHT: publishes this peer's record, finds those of others, and keeps its daemon alive.

hivemind starts a libp2p daemon (p2pd) as a child process. It is watched: when it dies it is started again with the same
identity and port, and what was published is published again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarm.discovery.records import (
    PeerRecord,
    RecordSeal,
    Verify,
    coordinator_key,
    open_record,
    peer_key,
    seal_record,
    stage_key,
)
from swarm.errors import ClockSkewError, RefusedError, SwarmError, UnreachableError

log = logging.getLogger(__name__)

START_DEADLINE_S = 30.0
STORE_DEADLINE_S = 10.0
FIND_DEADLINE_S = 5.0

REFRESH_SHARE = 1 / 3
"""A record is published again after this share of its lifetime."""

CACHE_S = 2.0
"""How long an answer is given again without asking."""

MAX_RESTARTS = 5
"""Attempts to bring a dead daemon back, with growing pauses, before the directory fails for good."""

RESTART_PAUSE_S = 0.3
STOP_DEADLINE_S = 2.0


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
        port: int,
        identity_path: Path | None,
        on_failed: Callable[[SwarmError], object],
    ) -> None:
        self.run_id = run_id
        self._seal = seal
        self._verify = verify
        self._initial_peers = tuple(initial_peers)
        self._local = local
        self._port = port
        self._identity_path = identity_path
        self._on_failed = on_failed
        self._node: Any = None
        self._p2p: Any = None
        self._addresses: list[str] = []
        self._records: list[PeerRecord] = []
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
            port: of the daemon; 0 takes a free one, and keeps it.
            identity_path: file with the libp2p key, made if missing; with it the multiaddress survives a restart.
            on_failed: called once if the daemon died and could not be brought back.

        Raises:
            UnreachableError: no initial peer answers within ``deadline_s``, or the daemon does not start.
            ClockSkewError: the clocks differ by more than the DHT allows.
        """
        self = cls(
            run_id,
            seal,
            verify,
            initial_peers=initial_peers,
            local=local,
            port=port,
            identity_path=identity_path,
            on_failed=on_failed,
        )
        try:
            async with asyncio.timeout(deadline_s):
                await self._open()
        except TimeoutError:
            await self.close()
            raise self._unreachable(f"no answer within {deadline_s:g} s") from None
        except BaseException:
            await self.close()
            raise
        self._tasks = [
            asyncio.create_task(self._watch(), name="dht-daemon"),
            asyncio.create_task(self._refresh(), name="dht-records"),
        ]
        return self

    def addresses(self) -> list[str]:
        """Multiaddresses that others join with; loopback only in a local run."""
        return list(self._addresses)

    @property
    def daemon_pid(self) -> int:
        """Process id of the libp2p daemon."""
        return int(self._p2p._child.pid)

    async def publish(self, record: PeerRecord) -> None:
        """Store a record, now and again before it expires.

        Raises:
            UnreachableError: no node took it within the deadline.
        """
        self._records = [old for old in self._records if old.peer_id != record.peer_id] + [record]
        if not await self._store(record):
            raise UnreachableError(
                f"The directory took no entry for {record.peer_id} within {STORE_DEADLINE_S:g} s.",
                meaning="Others could not find this peer.",
                remedy="Check the network, and that the clock of this machine is right.",
            )

    async def find_peer(self, peer_id: str) -> PeerRecord | None:
        """The record of a peer, None while there is none."""
        found = await self._find(peer_key(self.run_id, peer_id))
        return next((record for record in found if record.peer_id == peer_id), None)

    async def find_stage(self, stage: int) -> list[PeerRecord]:
        """All peers that announce ``stage``."""
        return [record for record in await self._find(stage_key(self.run_id, stage)) if record.stage == stage]

    async def find_coordinator(self) -> PeerRecord | None:
        """The coordinator, None while none is announced."""
        return next(iter(await self._find(coordinator_key(self.run_id))), None)

    def forget(self, peer_id: str) -> None:
        """Ask the DHT for this peer the next time, whatever was found lately."""
        self._cache.pop(peer_key(self.run_id, peer_id), None)

    async def close(self) -> None:
        """Stop the daemon; nothing of it stays behind. Closing twice is fine."""
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._shut()

    # the node

    async def _open(self) -> None:
        # Importing hivemind takes seconds, so it is done here and in a thread.
        hivemind, validator = await asyncio.to_thread(_load, self._verify)
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        host = ["/ip4/127.0.0.1"] if self._local else ["/ip4/0.0.0.0", "/ip6/::"]
        try:
            self._p2p = await hivemind.p2p.P2P.create(
                initial_peers=list(self._initial_peers) or None,
                host_maddrs=[f"{prefix}/tcp/{self._port}" for prefix in host],
                identity_path=str(self._identity_path) if self._identity_path else None,
                check_if_identity_free=False,
                nat_port_map=not self._local,
                auto_nat=not self._local,
                startup_timeout=START_DEADLINE_S,
            )
            self._node = await hivemind.dht.DHTNode.create(
                self._p2p, initial_peers=list(self._initial_peers) or None, record_validator=validator
            )
            visible = [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        except (P2PDaemonError, RuntimeError, ValueError, OSError) as error:
            await self._shut()
            raise self._unreachable(str(error)) from None
        except Exception as error:
            await self._shut()
            if "local time must be within" in str(error):
                raise _clock_skew(str(error)) from None
            raise
        loopback = re.compile(r"/ip4/127\.|/ip6/::1/")
        self._addresses = [address for address in visible if self._local or not loopback.search(address)]
        if not self._port and self._addresses:
            found = re.search(r"/tcp/(\d+)", self._addresses[0])
            # So that a daemon that is started again is where others look for it.
            self._port = int(found[1]) if found else 0

    async def _shut(self) -> None:
        node, p2p, self._node, self._p2p = self._node, self._p2p, None, None
        with contextlib.suppress(Exception):
            if node is not None:
                await asyncio.wait_for(node.shutdown(), STOP_DEADLINE_S)
        if p2p is None:
            return
        with contextlib.suppress(Exception):
            await asyncio.wait_for(p2p.shutdown(), STOP_DEADLINE_S)
        child = p2p._child
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        for address in (p2p._daemon_listen_maddr, p2p._client_listen_maddr):
            with contextlib.suppress(FileNotFoundError, TypeError, ValueError):
                os.remove(address["unix"])

    async def _watch(self) -> None:
        while True:
            await self._p2p._child.wait()
            if self._closed:
                return
            log.warning("The DHT daemon died; it is started again.")
            reason = "it ended"
            for attempt in range(MAX_RESTARTS):
                await self._shut()
                await asyncio.sleep(RESTART_PAUSE_S * 2**attempt)
                try:
                    async with asyncio.timeout(START_DEADLINE_S):
                        await self._open()
                    for record in self._records:
                        await self._store(record)
                    break
                except (SwarmError, TimeoutError) as error:
                    reason = str(error) or "no answer in time"
            else:
                self._on_failed(
                    UnreachableError(
                        f"The DHT daemon died and could not be started again in {MAX_RESTARTS} attempts: {reason}",
                        meaning="Others can no longer find this peer.",
                        remedy="Start the peer again; it continues from its state directory.",
                    )
                )
                return

    # records

    async def _refresh(self) -> None:
        while True:
            lifetime_s = min((record.lifetime_s for record in self._records), default=30.0)
            await asyncio.sleep(lifetime_s * REFRESH_SHARE)
            for record in self._records:
                if not await self._store(record):
                    log.warning("The directory did not take the entry of %s; it is tried again.", record.peer_id)

    async def _store(self, record: PeerRecord) -> bool:
        node = self._node
        if node is None:
            return False
        expires_at_s = time.time() + record.lifetime_s
        keys = record.keys()
        try:
            async with asyncio.timeout(STORE_DEADLINE_S):
                stored = await node.store_many(
                    keys=keys,
                    values=[seal_record(record, key, expires_at_s, self._seal) for key in keys],
                    expiration_time=[expires_at_s] * len(keys),
                    subkeys=[record.peer_id] * len(keys),
                )
        except RefusedError:
            raise
        except (TimeoutError, OSError, RuntimeError, ValueError) as error:
            log.debug("store failed: %s", error)
            return False
        return all(stored.values())

    async def _find(self, key: str) -> list[PeerRecord]:
        now = time.monotonic()
        cached = self._cache.get(key)
        if cached is not None and now - cached[0] < CACHE_S:
            return cached[1]
        node = self._node
        if node is None:
            return []
        try:
            async with asyncio.timeout(FIND_DEADLINE_S):
                # More than one node is asked, since a record that was just renewed is not everywhere yet.
                answer = await node.get(key, latest=True)
        except (TimeoutError, OSError, RuntimeError, ValueError) as error:
            log.debug("find failed: %s", error)
            return []
        found: list[PeerRecord] = []
        for entry in (answer.value if answer is not None and isinstance(answer.value, dict) else {}).values():
            try:
                stored_key, record, expires_at_s = open_record(entry.value, self._verify)
            except RefusedError as error:
                log.debug("record refused: %s", error)
                continue
            if stored_key == key and record.run_id == self.run_id and expires_at_s > time.time():
                found.append(record)
        if found:
            self._cache[key] = (now, found)
        return found

    def _unreachable(self, reason: str) -> UnreachableError:
        whom = ", ".join(self._initial_peers) or "its own daemon"
        return UnreachableError(
            f"Cannot join the directory through {whom}: {reason}.",
            meaning="This peer cannot find the others.",
            remedy="Check that the bootstrap runs and that its DHT port can be reached from here.",
        )


def _load(verify: Verify) -> tuple[Any, Any]:
    """hivemind, quiet, and a validator for our records."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    import hivemind
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.utils import MSGPackSerializer

    class SealValidator(RecordValidatorBase):
        """Keeps only records that are sealed by the peer that their subkey names, under the key that they name."""

        def validate(self, record: DHTRecord) -> bool:
            try:
                key, opened, expires_at_s = open_record(MSGPackSerializer.loads(record.value), verify)
                subkey = MSGPackSerializer.loads(record.subkey)
            except (RefusedError, ValueError, TypeError):
                return False
            return (
                subkey == opened.peer_id
                and DHTID.generate(source=key).to_bytes() == record.key
                and record.expiration_time <= expires_at_s + 1.0
            )

    return hivemind, SealValidator()


def _clock_skew(text: str) -> ClockSkewError:
    times = re.search(r"local: ([\d.]+), peer: ([\d.]+)", text)
    offset = f"{float(times[1]) - float(times[2]):+.1f} s" if times else "more than 3 s"
    return ClockSkewError(
        f"The clock of this machine is off by {offset} against the directory.",
        meaning="The directory refuses entries whose times differ by more than 3 s.",
        remedy="Set the clock (for example with NTP) and join again.",
    )
