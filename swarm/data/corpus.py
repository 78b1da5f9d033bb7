"""A corpus as two files of token ids on disk, training and held-out, read through memory maps.

The files are made once by streaming over the sources and are found again by a key of everything they depend on.
Documents are held out whole, by a hash of their number; a corpus of few documents is split by position instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
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

COPY_BYTES = 2**20


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

    Several processes may do so at once; each builds its own copy and one of them stays.

    Raises:
        DataError: empty, unreadable, a missing field, or shorter than one window of ``model.context + 1`` tokens.
    """
    files = source_files(data)
    tokenizer = load_tokenizer(data, model)
    dtype = np.dtype(f"<u{token_width(model.vocab_size)}")
    folder = cache_dir / _key(data, files, dtype)
    try:
        if not (folder / "meta.json").exists():
            cache_dir.mkdir(parents=True, exist_ok=True)
            _build(data, files, tokenizer, dtype, folder)
        meta = json.loads((folder / "meta.json").read_text())
        parts = [_map(folder / f"{name}.bin", dtype) for name in ("train", "validation")]
    except OSError as error:
        raise DataError(
            f"The token files in {cache_dir} could not be made or read: {error}.",
            meaning="The head cannot draw microbatches.",
            remedy="Make room on the disk, or choose another --state-dir.",
        ) from error
    for name, part in zip(("training", "held-out"), parts, strict=True):
        if len(part) < model.context + 1:
            raise DataError(
                f"The {name} part of {data.source!r} has {len(part)} tokens, fewer than the {model.context + 1} of one "
                "window.",
                meaning="There is nothing to train on." if name == "training" else "There is nothing to validate on.",
                remedy="Give more text, a smaller model.context, or another data.validation_share.",
            )
    return Corpus(parts[0], parts[1], meta["sha256"])


def _key(data: DataSpec, files: list[Path], dtype: np.dtype) -> str:
    sha = hashlib.sha256(data.model_dump_json().encode() + dtype.str.encode())
    for path in files:
        stat = path.stat()
        sha.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return sha.hexdigest()[:24]


def _build(data: DataSpec, files: list[Path], tokenizer: Tokenizer, dtype: np.dtype, folder: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        count = 0
        with (work / "train.bin").open("wb") as train, (work / "validation.bin").open("wb") as validation:
            for path in files:
                for text in documents(data, path):
                    held_out = _held_out(count, data.validation_share)
                    count += 1
                    _append(validation if held_out else train, tokenizer, text, dtype)
        if count < FEW_DOCUMENTS:
            _split_by_position(work, data, files, tokenizer, dtype)
        sha = hashlib.sha256()
        for name in ("train", "validation"):
            with (work / f"{name}.bin").open("rb") as file:
                while block := file.read(COPY_BYTES):
                    sha.update(block)
        (work / "meta.json").write_text(json.dumps({"sha256": sha.hexdigest(), "documents": count}))
        try:
            os.replace(work, folder)
        except OSError:
            # Another process was first.
            if not (folder / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _held_out(number: int, share: float) -> bool:
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _append(file: BinaryIO, tokenizer: Tokenizer, text: str, dtype: np.dtype) -> None:
    ids = tokenizer.encode(text)
    if not len(ids):
        return
    file.write(ids.astype(dtype, copy=False).tobytes())
    if tokenizer.separator is not None:
        file.write(dtype.type(tokenizer.separator).tobytes())


def _split_by_position(work: Path, data: DataSpec, files: list[Path], tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """All documents in order, the last ``validation_share`` of the tokens held out."""
    whole = work / "whole.bin"
    with whole.open("wb") as file:
        for path in files:
            for text in documents(data, path):
                _append(file, tokenizer, text, dtype)
    tokens = whole.stat().st_size // dtype.itemsize
    cut = (tokens - int(tokens * data.validation_share)) * dtype.itemsize
    with whole.open("rb") as source:
        for name, size in (("train", cut), ("validation", tokens * dtype.itemsize - cut)):
            with (work / f"{name}.bin").open("wb") as target:
                while size:
                    block = source.read(min(size, COPY_BYTES))
                    target.write(block)
                    size -= len(block)
    whole.unlink()


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
