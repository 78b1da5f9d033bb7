"""One node of the run's DHT and its daemon: joins, stores and gets; knows nothing of what the records mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.discovery.daemon import start_daemon, stop_daemon
from swarm.discovery.records import MAX_RECORD_BYTES, RecordCheck
from swarm.errors import ClockSkewError, RefusedError, SwarmError, UnreachableError

log = logging.getLogger(__name__)

GREET_S = 8.0
"""Connecting to a node and its answer; hivemind itself waits 3 s for the answer."""

FIRST_PAUSE_S = 0.3
LONGEST_PAUSE_S = 2.0
"""Between attempts to join: the bootstrap may be starting, or busy with many others."""

BACKOFF = "dial backoff"

REPLICAS = 5
"""Nodes that keep each record."""

BUCKET_SIZE = 10
"""Nodes asked for each record, and kept per bucket. Half of hivemind's: a find takes half as long, and thirty peers
that start together need half the time to know each other."""

EXPLORE_S = 10.0
MAX_NEIGHBOURS = 32
MAX_SUBKEY_BYTES = 256


class Node:
    """Use :meth:`start`."""

    def __init__(self, p2p: Any, dht: Any, addresses: list[str]) -> None:
        self._p2p = p2p
        self._dht = dht
        self.addresses = addresses
        """Multiaddresses of this node, as its daemon sees them."""

    @classmethod
    async def start(
        cls,
        folder: Path,
        identity_path: Path,
        check: RecordCheck,
        *,
        listen: Sequence[str],
        announce: Sequence[str],
        local: bool,
    ) -> Node:
        """A node that knows no other yet; arguments as for :func:`start_daemon`.

        Raises:
            UnreachableError: the daemon does not start.
        """
        hivemind = await asyncio.to_thread(import_hivemind)
        p2p = await start_daemon(folder, identity_path, listen=listen, announce=announce, local=local)
        try:
            dht = await hivemind.dht.DHTNode.create(
                p2p,
                # Derived, so that a node that is started again takes its old place.
                node_id=hivemind.dht.routing.DHTID.generate(source=p2p.peer_id.to_base58()),
                record_validator=_validator(check),
                bucket_size=BUCKET_SIZE,
                num_replicas=REPLICAS,
                # Finds always ask the nodes that keep a key: its caches would only add messages.
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
            )
            visible = [str(address) for address in await p2p.get_visible_maddrs(latest=True)]
        except BaseException:
            await stop_daemon(p2p)
            raise
        return cls(p2p, dht, visible)

    @property
    def daemon_pid(self) -> int:
        return int(self._p2p._child.pid)

    @property
    def peer_id(self) -> str:
        """libp2p's name of this node."""
        return str(self._p2p.peer_id.to_base58())

    @property
    def memory(self) -> Any:
        """What it keeps for the DHT; a node started in its place goes on with it."""
        return self._dht.protocol.storage

    def inherit(self, memory: Any) -> None:
        """Keep what an earlier node kept."""
        self._dht.protocol.storage = memory

    async def ended(self) -> int:
        """Return when the daemon has died, with its exit status."""
        return int(await self._p2p._child.wait())

    async def join(self, addresses: Sequence[str], deadline_s: float) -> None:
        """Become part of the DHT of the nodes at ``addresses``; one that answers suffices.

        Raises:
            UnreachableError: none did; names each with its reason.
            ClockSkewError: the clocks differ too much.
        """
        others = [address for address in addresses if not address.endswith(f"/p2p/{self.peer_id}")]
        if not others:
            return
        reasons: dict[str, str] = {}
        pause_s = FIRST_PAUSE_S
        try:
            async with asyncio.timeout(deadline_s):
                while not await self._greet_any(others, reasons):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except TimeoutError:
            listed = "; ".join(f"{address}: {reasons.get(address, 'no answer')}" for address in others)
            raise UnreachableError(
                f"Cannot join the directory within {deadline_s:.1f} s. {listed}.",
                meaning="This peer cannot find the others.",
                remedy="Check that the bootstrap runs and that its DHT port can be reached from here.",
            ) from None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dht.find_nearest_nodes([self._dht.node_id]), EXPLORE_S)

    async def greet(self, address: str) -> None:
        """Connect to a node, and let each know the other.

        Raises:
            UnreachableError: no answer, or it cannot reach this node.
            ClockSkewError: the clocks differ too much.
        """
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        base, _, name = address.rpartition("/p2p/")
        try:
            async with asyncio.timeout(GREET_S):
                peer = PeerID.from_base58(name)
                await self._p2p._client.connect(peer, [Multiaddr(base)])
                if await self._dht.protocol.call_ping(peer, validate=True, strict=True) is None:
                    raise UnreachableError("connected, but it does not answer as a node of a DHT")
        except SwarmError:
            raise
        except TimeoutError:
            raise UnreachableError(f"no answer within {GREET_S:g} s") from None
        except Exception as error:  # hivemind, its daemon and its parser raise a dozen kinds
            skew = clock_skew(str(error))
            raise skew or UnreachableError(_short(error)) from None

    async def _greet_any(self, addresses: Sequence[str], reasons: dict[str, str]) -> bool:
        """Greet all at once, until one has answered."""
        tasks = {asyncio.create_task(self.greet(address)): address for address in addresses}
        skew: ClockSkewError | None = None
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    await finished
                    return True
                except ClockSkewError as error:
                    skew = error
                except UnreachableError:
                    pass
        finally:
            for task, address in tasks.items():
                error = task.exception() if task.done() and not task.cancelled() else None
                # libp2p does not dial again for 5 s after a failure; the failure says more than that.
                if error is not None and (address not in reasons or BACKOFF not in str(error)):
                    reasons[address] = str(error)
                task.cancel()
        if skew is not None:
            raise skew
        return False

    async def neighbours(self) -> list[str]:
        """Multiaddresses of nodes that the daemon is connected to, at most :data:`MAX_NEIGHBOURS`."""
        peers = await self._p2p.list_peers()
        found = [f"{peer.addrs[0]}/p2p/{peer.peer_id.to_base58()}" for peer in peers if peer.addrs]
        return found[:MAX_NEIGHBOURS]

    async def store(self, sealed: dict[str, bytes], subkey: str, expires_at_s: float) -> bool:
        """Store a value under ``subkey`` of each key; whether all were taken."""
        keys = list(sealed)
        stored = await self._dht.store_many(
            keys=keys,
            values=[sealed[key] for key in keys],
            expiration_time=[expires_at_s] * len(keys),
            subkeys=[subkey] * len(keys),
        )
        return all(stored.values())

    async def get(self, key: str) -> list[object]:
        """The values of all subkeys of ``key``, from all nodes that keep some."""
        answer = await self._dht.get(key, latest=True)
        if answer is None or not isinstance(answer.value, dict):
            return []
        return [entry.value for entry in answer.value.values()]

    async def stop(self) -> None:
        """End the daemon; nothing of it stays behind."""
        self._dht.is_alive = False
        if self._p2p._child.returncode is None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._dht.shutdown(), 1.0)
        if self._dht.cache_refresh_task is not None:
            self._dht.cache_refresh_task.cancel()
        await stop_daemon(self._p2p)


def import_hivemind() -> Any:
    """hivemind, quiet unless this package's logging is at DEBUG. The import takes 3 to 5 s."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if log.isEnabledFor(logging.DEBUG) else "CRITICAL")
    import hivemind

    return hivemind


def clock_skew(text: str) -> ClockSkewError | None:
    """hivemind's refusal of clocks as an error with the offset, None if ``text`` is about something else."""
    if "local time must be within" not in text:
        return None
    times = re.search(r"local: ([\d.]+), peer: ([\d.]+)", text)
    offset = f"{float(times[1]) - float(times[2]):+.1f} s" if times else "more than 3 s"
    return ClockSkewError(
        f"The clock of this machine is off by {offset} against the directory.",
        meaning="The directory refuses nodes whose clocks differ by more than 3 s.",
        remedy="Set the clock (for example with NTP) and join again.",
    )


def _validator(check: RecordCheck) -> Any:
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.utils import MSGPackSerializer

    class SealValidator(RecordValidatorBase):
        """Keeps only records sealed by the peer that their subkey names, under the key and until the time they name."""

        def validate(self, record: DHTRecord) -> bool:
            if len(record.value) > MAX_RECORD_BYTES + 8 or len(record.subkey) > MAX_SUBKEY_BYTES:
                return False
            try:
                key, opened = check.open(MSGPackSerializer.loads(record.value))
                subkey = MSGPackSerializer.loads(record.subkey)
            except RefusedError as error:
                log.debug("record refused: %s", error)
                return False
            except Exception as error:  # a stranger chose these bytes; the parser may raise anything
                log.debug("record unreadable: %r", error)
                return False
            return (
                subkey == opened.peer_id
                and DHTID.generate(source=key).to_bytes() == record.key
                and record.expiration_time == opened.expires_at_s
            )

    return SealValidator()


def _short(error: Exception) -> str:
    """The first line of an error of the daemon."""
    lines = (str(error) or type(error).__name__).strip().splitlines()
    return " ".join(line.strip() for line in lines[:3])[:300].rstrip(".")
