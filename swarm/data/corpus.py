"""A corpus as two files of token ids on disk, training and held-out, read through memory maps.

The files are made once by streaming over the sources and are found again by a key of everything they depend on.
Documents are held out whole, by a hash of their number. A corpus for which that misses the share (few documents, or
one that outweighs the others) is split by position instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from swarm.config.spec import DataSpec, ModelSpec
from swarm.core.frame import token_width
from swarm.data.sources import documents, source_files
from swarm.data.tokenizers import Tokenizer, load_tokenizer
from swarm.errors import DataError

FEW_DOCUMENTS = 50
"""Below this many documents, holding whole ones out could miss the share by far: the tail is held out instead."""

SHARE_FACTOR = 2.0
"""So many times more or less than ``validation_share`` may be held out before the tail is held out instead."""

COPY_BYTES = 2**20
BUILD_ATTEMPTS = 3
"""Tries to build or read the files while other processes build, replace or clear the same ones."""

_LAYOUT = 2
"""Part of the key of token files; rises when their bytes would be others."""
_WORK = ".building-"
_PARTS = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """Token ids on disk."""

    train: np.ndarray
    """(tokens,) memory map of unsigned integers."""
    validation: np.ndarray
    digest: str
    """SHA-256 of both parts: equal on every machine that has the same text and tokenizer."""

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def validation_tokens(self) -> int:
        return len(self.validation)


def open_corpus(data: DataSpec, model: ModelSpec, cache_dir: Path) -> Corpus:
    """Build the token files in ``cache_dir``, or find them there.

    Several processes may do so at once; each builds its own copy and one of them stays. What a killed process left
    half built is removed.

    Raises:
        DataError: empty, unreadable, a missing field, or shorter than two windows of ``model.context + 1`` tokens (one
            to train on, one held out).
    """
    files = source_files(data)
    tokenizer = load_tokenizer(data, model)
    build = _Build(data, files, tokenizer, np.dtype(f"<u{token_width(model.vocab_size)}"), model.context + 1)
    try:
        folder = cache_dir / build.key()
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_dir)
        corpus = _read(folder, build.dtype)
        for _ in range(BUILD_ATTEMPTS):
            if corpus is not None:
                break
            with _work_folder(cache_dir) as work:
                build.run(work / "corpus")
                _put(work, folder, build.dtype)
            corpus = _read(folder, build.dtype)
        if corpus is None:
            raise OSError(f"other processes kept replacing {folder.name}")
    except OSError as error:
        raise DataError(
            f"The token files in {cache_dir} could not be made or read: {error}.",
            meaning="The head cannot draw microbatches.",
            remedy="Make room on the disk, or choose another --state-dir.",
        ) from error
    _check_length(corpus, data, build)
    return corpus


def _check_length(corpus: Corpus, data: DataSpec, build: _Build) -> None:
    tokens = corpus.train_tokens + corpus.validation_tokens
    if not tokens:
        raise DataError(
            f"The corpus {data.source!r} has no text: files read: {len(build.files)}.",
            meaning="There is nothing to train on.",
            remedy="Give data.source files with text in them.",
        )
    if min(corpus.train_tokens, corpus.validation_tokens) < build.window:
        raise DataError(
            f"The corpus {data.source!r} has {tokens} tokens, fewer than two windows of {build.window}.",
            meaning="One is needed to train on and another that is held out.",
            remedy="Give more text, or a smaller model.context.",
        )


@dataclass(frozen=True, slots=True)
class _Build:
    """Makes the token files."""

    data: DataSpec
    files: list[Path]
    tokenizer: Tokenizer
    dtype: np.dtype
    window: int

    def key(self) -> str:
        """A name for everything that the token files depend on."""
        parts = (_LAYOUT, self.data.model_dump_json(), self.tokenizer.digest, self.dtype.str, self.window)
        sha = hashlib.sha256(repr(parts).encode())
        for path in self.files:
            stat = path.stat()
            sha.update(f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return sha.hexdigest()[:24]

    def run(self, folder: Path) -> None:
        """Make the files in ``folder``, which is made too, and flush them to the disk."""
        folder.mkdir()
        paths = {name: folder / f"{name}.bin" for name in _PARTS}
        with paths["train"].open("wb") as train, paths["validation"].open("wb") as validation:
            share = self.data.validation_share
            count = self._write(lambda number: validation if _held_out(number, share) else train)
        if not self._well_split(count, *(path.stat().st_size // self.dtype.itemsize for path in paths.values())):
            self._split_by_position(folder)
        sha = hashlib.sha256()
        for path in paths.values():
            with path.open("rb") as file:
                while block := file.read(COPY_BYTES):
                    sha.update(block)
                os.fsync(file.fileno())
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        with (folder / "meta.json").open("w") as file:
            json.dump({"sha256": sha.hexdigest(), "documents": count, "bytes": sizes}, file)
            file.flush()
            os.fsync(file.fileno())

    def _write(self, choose: Callable[[int], BinaryIO]) -> int:
        """Write the documents, each to the file chosen for its number; return how many there were."""
        number = 0
        begun = False
        for path in self.files:
            for piece in documents(self.data, path):
                file = choose(number)
                ids = self.tokenizer.encode(piece.text)
                if len(ids):
                    file.write(ids.astype(self.dtype, copy=False).tobytes())
                    begun = True
                if piece.last:
                    if begun and self.tokenizer.separator is not None:
                        file.write(self.dtype.type(self.tokenizer.separator).tobytes())
                    number += 1
                    begun = False
        return number

    def _well_split(self, documents_read: int, train: int, validation: int) -> bool:
        share = self.data.validation_share
        return (
            documents_read >= FEW_DOCUMENTS
            and min(train, validation) >= self.window
            and share / SHARE_FACTOR <= validation / (train + validation) <= share * SHARE_FACTOR
        )

    def _split_by_position(self, folder: Path) -> None:
        """All documents in order, the last ``validation_share`` of the tokens held out, at least a window."""
        whole = folder / "whole.bin"
        with whole.open("wb") as file:
            self._write(lambda _: file)
        tokens = whole.stat().st_size // self.dtype.itemsize
        held_out = min(tokens, max(int(tokens * self.data.validation_share), self.window))
        sizes = ((tokens - held_out) * self.dtype.itemsize, held_out * self.dtype.itemsize)
        with whole.open("rb") as source:
            for name, size in zip(_PARTS, sizes, strict=True):
                with (folder / f"{name}.bin").open("wb") as target:
                    while size and (block := source.read(min(size, COPY_BYTES))):
                        target.write(block)
                        size -= len(block)
        whole.unlink()


def _held_out(number: int, share: float) -> bool:
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _read(folder: Path, dtype: np.dtype) -> Corpus | None:
    """The corpus in ``folder``; None if it is not there, or not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in _PARTS}
        if meta["bytes"] != sizes:
            return None
        train, validation = (_map(folder / f"{name}.bin", dtype) for name in _PARTS)
        return Corpus(train, validation, meta["sha256"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _put(work: Path, folder: Path, dtype: np.dtype) -> None:
    """Move the files built in ``work`` to ``folder``, unless another process was first with good ones."""
    try:
        os.replace(work / "corpus", folder)
    except OSError:
        if not folder.exists():
            raise
        if _read(folder, dtype) is None:
            os.replace(folder, work / "damaged")
            os.replace(work / "corpus", folder)


@contextmanager
def _work_folder(cache_dir: Path) -> Iterator[Path]:
    """A new folder that is locked while its process lives, and removed afterwards."""
    work, lock = _locked_folder(cache_dir)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _locked_folder(cache_dir: Path) -> tuple[Path, int]:
    for _ in range(BUILD_ATTEMPTS):
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=cache_dir))
        lock = _lock(work)
        if lock is not None:
            return work, lock
        # Another process took the folder for an abandoned one before it was locked.
    raise OSError(f"other processes kept clearing {cache_dir}")


def _lock(work: Path) -> int | None:
    """A descriptor that holds the lock of ``work``; None if a living process has it, or the folder is gone."""
    try:
        lock = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (work / "lock").exists():
            return lock
    except BlockingIOError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _remove_abandoned(cache_dir: Path) -> None:
    for work in cache_dir.glob(f"{_WORK}*"):
        lock = _lock(work)
        if lock is not None:
            shutil.rmtree(work, ignore_errors=True)
            os.close(lock)
