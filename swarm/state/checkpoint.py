"""Checkpoints of one stage as safetensors files, each whole or absent.

A file is written beside its place, flushed to the disk and renamed, so a crash leaves the one before. Its metadata
has a digest of all tensor bytes: safetensors notices a truncated file, the digest an altered one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swarm.errors import CheckpointError

_NAME = re.compile(r"step-(\d{10})\.safetensors")
_TEMPORARY = ".part"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved at ``step``."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, str]


class CheckpointStore:
    """The checkpoints of one stage in ``folder``, the newest ``keep`` of them.

    Raises:
        CheckpointError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, run_id: str, stage: int, keep: int) -> None:
        self.folder = folder
        self.run_id, self.stage, self.keep = run_id, stage, keep
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise self._failed("prepared", error) from error

    def steps(self) -> list[int]:
        """Steps with a checkpoint, rising; whether they can be read is only known on loading.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        try:
            return self._steps()
        except OSError as error:
            raise self._failed("looked for", error) from error

    def _steps(self) -> list[int]:
        names = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, str]) -> Path:
        """Write a checkpoint, then delete those beyond ``keep``.

        What an interrupted save left is deleted first, here and not on opening: opening may turn out to be a mistake (a
        second process that :class:`Journal` refuses), and must not touch a file that is being written.

        Args:
            tensors: on the CPU, contiguous, none sharing memory; written as they are, with at most one copy of them
                in memory.
            meta: ``run_id``, ``stage``, ``step`` and ``sha256`` are the store's own.

        Raises:
            CheckpointError: the disk refused; the checkpoints before are untouched.
        """
        path = self._path(step)
        temporary = path.with_suffix(_TEMPORARY)
        header = meta | {
            "run_id": self.run_id,
            "stage": str(self.stage),
            "step": str(step),
            "sha256": digest(tensors),
        }
        try:
            for stale in self.folder.glob(f"*{_TEMPORARY}"):
                stale.unlink()
            temporary.touch(0o600)
            save_file(tensors, temporary, metadata=header)
            os.chmod(temporary, 0o600)
            _flush(temporary)
            os.replace(temporary, path)
            _flush(self.folder)
            for old in self._steps()[: -self.keep]:
                self._path(old).unlink()
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._failed("written", error) from error
        return path

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of ``step`` and check it.

        Raises:
            CheckpointError: missing, truncated, altered, or of another run or stage.
        """
        path = self._path(step)
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                for key, expected in (("run_id", self.run_id), ("stage", str(self.stage)), ("step", str(step))):
                    if meta.get(key) != expected:
                        raise self._broken(path, f"its {key} is {meta.get(key)!r}, not {expected!r}")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found = digest(tensors)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # an altered header may name a type or a shape that torch refuses in its own way
            raise self._broken(path, str(error)) from error
        if found != meta.get("sha256"):
            raise self._broken(path, "its tensors are not those that were saved (SHA-256 differs)")
        return Checkpoint(step, tensors, meta)

    def newest(self, report: Callable[[CheckpointError], None], at_most: int | None = None) -> Checkpoint | None:
        """The newest readable checkpoint, of step ``at_most`` at the latest; ``report`` hears of each broken one."""
        for step in reversed(self.steps()):
            if at_most is not None and step > at_most:
                continue
            try:
                return self.load(step)
            except CheckpointError as error:
                report(error)
        return None

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints above ``step``: their future was given up.

        Raises:
            CheckpointError: one could not be deleted.
        """
        try:
            for other in reversed(self._steps()):
                if other > step:
                    self._path(other).unlink()
        except OSError as error:
            raise self._failed("deleted", error) from error

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}.safetensors"

    def _broken(self, path: Path, reason: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint {path.name} of stage {self.stage} cannot be used: {reason}.",
            meaning="The one before it is used, and the steps since then are replayed if the journal has them.",
            remedy="If it happens again, check the disk.",
        )

    def _failed(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"A checkpoint of stage {self.stage} could not be {what}: {error}.",
            meaning="Training goes on; the checkpoint before it is whole.",
            remedy="Make room on the disk, or choose another --state-dir.",
        )


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
