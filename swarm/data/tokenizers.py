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
    separator: int | None
    """Stands between two documents; None if the vocabulary has no token for that."""

    def encode(self, text: str) -> np.ndarray: ...


class ByteTokenizer:
    """UTF-8 bytes are the token ids; 0 separates documents."""

    vocab_size = 256
    separator: int | None = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


class FileTokenizer:
    """A Hugging Face ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError:
            raise DataError(
                f"The tokenizer {path} needs the package tokenizers, which is not installed.",
                remedy="Install it with: pip install 'swarm[tokenizers]'.",
            ) from None
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"Cannot read the tokenizer {path}: {error}.", remedy="Give the path of a tokenizer.json."
            ) from None
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ids = (self._tokenizer.token_to_id(token) for token in _END_TOKENS)
        self.separator: int | None = next((number for number in ids if number is not None), None)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def tokenizer_digest(path: Path | str) -> str:
    """SHA-256 of a tokenizer file, for ``data.tokenizer_sha256``.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            f"Cannot read the tokenizer {path}: {error.strerror or error}.",
            remedy="Set data.tokenizer to 'bytes' or to the path of a tokenizer.json.",
        ) from error


def load_tokenizer(data: DataSpec, model: ModelSpec) -> Tokenizer:
    """The run's tokenizer.

    Raises:
        DataError: missing, not the one of the run, or too large for the model.
    """
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    path = Path(data.tokenizer).expanduser()
    digest = tokenizer_digest(path)
    if data.tokenizer_sha256 and digest != data.tokenizer_sha256:
        raise DataError(
            f"The tokenizer {path} has the digest {digest[:16]}, the run's has {data.tokenizer_sha256[:16]}.",
            meaning="Its token ids would mean something else to the other peers.",
            remedy="Use the tokenizer.json that the run was created with.",
        )
    tokenizer = FileTokenizer(path)
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"The tokenizer {path} has {tokenizer.vocab_size} tokens, the model only {model.vocab_size}.",
            remedy=f"Set model.vocab_size to {tokenizer.vocab_size} or more.",
        )
    return tokenizer
