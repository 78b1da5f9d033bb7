"""The libp2p daemon (p2pd) of this process: its key, its private folder, its start and its end.

hivemind starts the daemon as a child. The daemon ends by itself within seconds when its parent is killed, once hivemind
has connected to it; before that, after ``idleTimeout`` (30 s). Its sockets lie in a folder of their own, removed
at the end, or by a later process if this one is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.errors import SpecError, UnreachableError, UsageError

log = logging.getLogger(__name__)

FOLDER_PREFIX = "swarm-dht-"
MAX_BASE_CHARACTERS = 50
"""The path of a unix socket has at most about 104 characters."""

SWEEP_AFTER_S = 60.0
"""A folder nobody holds is removed when it is older; a new one may not be held yet."""

START_DAEMON_S = 20.0
STOP_DAEMON_S = 2.0
"""How long the daemon may take to end by itself before it is killed."""

ED25519 = 1
"""Key type in libp2p's private keys."""


class PrivateFolder:
    """A folder for this process's sockets, held by a lock that the kernel drops when the process dies."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(base) > MAX_BASE_CHARACTERS:
            base = "/tmp"
        _sweep(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it with all that is in it; twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _sweep(base: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in base.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < SWEEP_AFTER_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def ensure_identity(path: Path) -> None:
    """Make the daemon's key (mode 0600) unless there is one.

    Raises:
        SpecError: the file is damaged, or cannot be read or written.
    """
    from google.protobuf.message import DecodeError
    from hivemind.proto import crypto_pb2

    private_key: Any = crypto_pb2.PrivateKey  # pyright: ignore[reportAttributeAccessIssue]

    try:
        if not path.exists():
            key = Ed25519PrivateKey.generate()
            raw = key.private_bytes_raw() + key.public_key().public_bytes_raw()
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(private_key(key_type=ED25519, data=raw).SerializeToString())
                os.fsync(file.fileno())
            draft.replace(path)
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        if not private_key.FromString(path.read_bytes()).data:
            raise DecodeError("it is empty")
    except (OSError, DecodeError) as error:
        raise SpecError(
            f"The key of the directory's daemon in {path} cannot be used: {error}.",
            meaning="Without it this peer has another address in the directory.",
            remedy="Restore the file, or delete it to get a new address.",
        ) from None


def check_port_free(port: int, host: str) -> None:
    """Raises UsageError if something else listens on ``port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise UsageError(
                f"The directory cannot listen on {host} port {port}: {error.strerror}.",
                meaning="Another process uses that port, or it is not this user's.",
                remedy="Choose another port, or 0 for a free one.",
            ) from None


def multiaddress(host: str, port: int) -> str:
    """The TCP multiaddress of an IPv4 or IPv6 address or a name."""
    try:
        kind = f"ip{ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{port}"


async def start_daemon(
    folder: Path, identity_path: Path, *, listen: Sequence[str], announce: Sequence[str], local: bool
) -> Any:
    """A running daemon, as hivemind's ``P2P``.

    Args:
        folder: for its sockets.
        listen: multiaddresses to listen on.
        announce: multiaddresses that others are told instead of those that the daemon finds.
        local: no port mapping and no NAT detection.

    Raises:
        UnreachableError: it does not start.
    """
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError

    born: list[Any] = []

    class Daemon(P2P):
        _UNIX_SOCKET_PREFIX = f"/unix{folder}/"

        def __init__(self) -> None:
            super().__init__()
            born.append(self)  # so that one whose start fails or is cancelled can be stopped

    try:
        async with asyncio.timeout(START_DAEMON_S):
            daemon: Any = await Daemon.create(
                host_maddrs=list(listen),
                announce_maddrs=list(announce) or None,
                identity_path=str(identity_path),
                check_if_identity_free=False,
                nat_port_map=not local,
                auto_nat=not local,
                startup_timeout=START_DAEMON_S,
            )
        control = daemon._client.control
        for task in (control._read_task, control._write_task):
            # They fail when the daemon dies, which is noticed elsewhere; unread, the loop would log it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return daemon
    except (P2PDaemonError, ControlFailure, OSError, ValueError, EOFError, TimeoutError) as error:
        for daemon in born:
            await stop_daemon(daemon)
        reason = str(error) or f"it is not ready after {START_DAEMON_S:g} s"
        raise UnreachableError(
            f"The directory's daemon does not start: {reason}.",
            meaning="This peer can neither find others nor be found.",
            remedy="Check that its port is free and that hivemind is installed for this platform.",
        ) from None
    except BaseException:
        for daemon in born:
            await stop_daemon(daemon)
        raise


async def stop_daemon(p2p: Any) -> None:
    """End the daemon, at the latest by killing it, and remove its sockets."""
    child = p2p._child
    with contextlib.suppress(Exception):
        p2p._terminate()
    if child is not None and child.returncode is None:
        try:
            await asyncio.wait_for(child.wait(), STOP_DAEMON_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), STOP_DAEMON_S)
    for address in (p2p._daemon_listen_maddr, p2p._client_listen_maddr):
        with contextlib.suppress(OSError):
            os.remove(address["unix"])
