"""Tokenizers: the bytes themselves, or a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from swarm.config.spec import DataSpec, ModelSpec
from swarm.errors import DataError

_END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Text to token ids."""

    vocab_size: int
    """One more than the highest token id."""
    separator: int | None
    """Stands between two documents; None if the vocabulary has no token for that."""
    digest: str
    """Tokenizers of equal digests give equal ids."""

    def encode(self, text: str) -> np.ndarray: ...


class ByteTokenizer:
    """UTF-8 bytes are the token ids; 0 separates documents."""

    vocab_size = 256
    separator: int | None = 0
    digest = "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), dtype=np.uint8)


class FileTokenizer:
    """A Hugging Face ``tokenizer.json`` (``content``, read from ``path``).

    Raises:
        DataError: it is none, or the package that reads it is not installed.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError:
            raise DataError(
                f"The tokenizer {path} needs the package tokenizers, which is not installed.",
                meaning="The corpus cannot be turned into token ids.",
                remedy="Install it with: pip install 'swarm[tokenizers]'.",
            ) from None
        try:
            self._tokenizer = HuggingFaceTokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"Cannot read the tokenizer {path}: {error}.",
                meaning="The corpus cannot be turned into token ids.",
                remedy="Give the path of a tokenizer.json.",
            ) from None
        # Files made for fine-tuning cut and fill every text to one length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.digest = hashlib.sha256(content).hexdigest()
        # Ids may have gaps, so their number is not enough.
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        ids = (self._tokenizer.token_to_id(token) for token in _END_TOKENS)
        self.separator: int | None = next((number for number in ids if number is not None), None)

    def encode(self, text: str) -> np.ndarray:
        text = _utf8(text).decode()
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def tokenizer_digest(path: Path | str) -> str:
    """SHA-256 of a tokenizer file, for ``data.tokenizer_sha256``.

    Raises:
        DataError: it cannot be read.
    """
    return hashlib.sha256(_content(Path(path))).hexdigest()


def load_tokenizer(data: DataSpec, model: ModelSpec) -> Tokenizer:
    """The run's tokenizer.

    Raises:
        DataError: missing, not the one of the run, or too large for the model.
    """
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    path = Path(data.tokenizer)
    content = _content(path)
    digest = hashlib.sha256(content).hexdigest()
    if data.tokenizer_sha256 and digest != data.tokenizer_sha256:
        raise DataError(
            f"The tokenizer {path} has the digest {digest[:16]}, the run's has {data.tokenizer_sha256[:16]}.",
            meaning="Its token ids would mean something else to the other peers.",
            remedy="Use the tokenizer.json that the run was created with.",
        )
    tokenizer = FileTokenizer(path, content)
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"The tokenizer {path} has token ids up to {tokenizer.vocab_size - 1}, the model only up to "
            f"{model.vocab_size - 1}.",
            meaning="Some of its tokens would have no embedding.",
            remedy=f"Set model.vocab_size to {tokenizer.vocab_size} or more.",
        )
    return tokenizer


def _content(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~name of nobody
        raise DataError(
            f"Cannot read the tokenizer {path}: {getattr(error, 'strerror', None) or error}.",
            meaning="The corpus cannot be turned into token ids.",
            remedy="Set data.tokenizer to 'bytes' or to the path of a tokenizer.json.",
        ) from error


def _utf8(text: str) -> bytes:
    """JSON may hold lone surrogates, which UTF-8 has no bytes for."""
    return text.encode("utf-8", errors="replace")
