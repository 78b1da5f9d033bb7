"""Files that only their owner may read: keys, certificates and what an invitation was used for."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

from swarm.errors import UsageError

MAX_FILE_BYTES = 16 * 2**20
"""Larger files are not ours."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_private(path: Path) -> bytes | None:
    """The content of ``path``; None if there is no such file.

    Raises:
        UsageError: it cannot be read, is too large, or other users of the machine may read it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if os.name == "posix" and status.st_mode & _OTHERS:
                raise UsageError(
                    f"{path} may be read by other users (mode {stat.S_IMODE(status.st_mode):04o}).",
                    meaning="Whoever read it can act as this peer, so it is not used.",
                    remedy=f"If nobody did: chmod 600 {path}. Else delete it, and enrol again.",
                )
            if status.st_size > MAX_FILE_BYTES:
                raise UsageError(f"{path} has {status.st_size} bytes; that is no file of this peer.")
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from None


def write_private(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` with ``data``, mode 0600.

    After a crash the file is the old one or the new one, never a part of it.

    Raises:
        UsageError: it cannot be written.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise _unusable(path, error) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes that do the same out, from reading ``path`` until it is written.

    Raises:
        UsageError: the lock file beside it cannot be used.
    """
    if fcntl is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path} cannot be used: {error.strerror or error}.",
        remedy="Choose a state directory that this user may read and write.",
    )
