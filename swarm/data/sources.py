"""Documents, a piece at a time, from the standard library, text, JSONL or Parquet."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from swarm.config.spec import DataSpec
from swarm.errors import DataError

MAX_LINE_BYTES = 64 * 2**20
"""A line of JSONL above this is refused instead of being read into memory."""

PIECE_CHARACTERS = 2**18
"""Longer documents are read and tokenized in pieces of about this size, which bounds the memory of both."""

PARQUET_BATCH_ROWS = 256
MAX_NAMES_SHOWN = 10

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


class Piece(NamedTuple):
    """A part of a document, usually all of it."""

    text: str
    last: bool
    """Whether the document ends here."""


def source_files(data: DataSpec) -> list[Path]:
    """The files of a source, sorted. Of directories all but what is hidden; links to directories are not followed.

    Raises:
        DataError: there are none, or a directory cannot be read.
    """
    try:
        files = _found(data.source)
    except (OSError, RuntimeError) as error:  # RuntimeError: a ~name of nobody
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else "whose home is that?"
        raise DataError(
            f"The corpus {data.source!r} cannot be listed ({reason}).",
            meaning="It would not be the same as on other heads, so nothing was started.",
            remedy="Make the directories readable, or correct data.source.",
        ) from error
    if not files:
        raise DataError(
            f"The corpus {data.source!r} has no files.",
            meaning="There is nothing to train on.",
            remedy="Give data.source as 'stdlib', a file, a directory, or a glob that matches files.",
        )
    return sorted(files)


def _found(source: str) -> list[Path]:
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return [path for path in _walk(root, skip=_NOT_STDLIB) if path.suffix == ".py"]
    path = Path(source).expanduser()
    if path.is_dir():
        return list(_walk(path))
    if path.is_file():
        return [path]
    return [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]


def _walk(root: Path, skip: Iterable[str] = ()) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        # A directory passed over in silence would make another corpus than on other machines.
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        yield from (path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file())


def documents(data: DataSpec, path: Path) -> Iterator[Piece]:
    """The documents of one file.

    Raises:
        DataError: the file cannot be read, or lacks the field.
    """
    kind = data.format if data.format != "auto" else _SUFFIXES.get(path.suffix.lower(), "text")
    try:
        match kind:
            case "jsonl":
                for text in _jsonl(path, data.field):
                    yield from _pieces(_blocks(text))
            case "parquet":
                for text in _parquet(path, data.field):
                    yield from _pieces(_blocks(text))
            case _:
                # Sources of other encodings exist; a replaced character is better than a lost corpus.
                with path.open(encoding="utf-8", errors="replace") as file:
                    yield from _pieces(iter(lambda: file.read(PIECE_CHARACTERS), ""))
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror or error}.",
            meaning="The corpus would not be the same as on other heads, so nothing was started.",
            remedy="Make the file readable, or take it out of data.source.",
        ) from error


def _blocks(text: str) -> Iterator[str]:
    return (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))


def _pieces(blocks: Iterator[str]) -> Iterator[Piece]:
    """One document, cut before white space where there is some: tokenizers put it in front of a word."""
    text = next(blocks, "")
    for block in blocks:
        cut = max(text.rfind("\n"), text.rfind(" "))
        if cut <= 0:
            cut = len(text)
        yield Piece(text[:cut], last=False)
        text = text[cut:] + block
    yield Piece(text, last=True)


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise _bad(path, f"Line {number}", f"is longer than {MAX_LINE_BYTES >> 20} MiB")
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _bad(path, f"Line {number}", f"is not JSON that can be read ({error})") from None
            if not isinstance(entry, dict) or field not in entry:
                keys = _names(entry) if isinstance(entry, dict) else type(entry).__name__
                raise _bad(path, f"Line {number}", f"has no field {field!r} (it has: {keys})")
            yield _string(entry[field], path, f"Line {number}", field)


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path} is Parquet, and pyarrow is not installed.",
            meaning="Its documents cannot be read.",
            remedy="Install it with: pip install 'swarm[parquet]'.",
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise DataError(
                    f"{path} has no column {field!r} (it has: {_names(file.schema_arrow.names)}).",
                    meaning="The corpus cannot be used as it is.",
                    remedy="Set data.field to the column with the text.",
                )
            row = 0
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    text = value.as_py()
                    if text is not None:
                        yield _string(text, path, f"Row {row}", field)
    except pyarrow.lib.ArrowException as error:
        raise DataError(
            f"{path} is not a Parquet file that can be read: {error}.",
            meaning="The corpus would not be the same as on other heads, so nothing was started.",
            remedy="Take it out of data.source.",
        ) from None


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - MAX_NAMES_SHOWN
    return ", ".join(ordered[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _string(value: object, path: Path, place: str, field: str) -> str:
    if not isinstance(value, str):
        raise _bad(path, place, f"has a value of type {type(value).__name__} in field {field!r}, not a string")
    return value


def _bad(path: Path, place: str, reason: str) -> DataError:
    return DataError(
        f"{place} of {path} {reason}.",
        meaning="The corpus cannot be used as it is.",
        remedy="Correct it, or set data.field to the field with the text.",
    )
