"""Documents, one at a time, from the standard library, text, JSONL or Parquet."""

from __future__ import annotations

import glob
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from swarm.config.spec import DataSpec
from swarm.errors import DataError

MAX_LINE_BYTES = 64 * 2**20
"""A line of JSONL above this is refused instead of being read into memory."""

PARQUET_BATCH_ROWS = 256

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def source_files(data: DataSpec) -> list[Path]:
    """The files of a source, sorted.

    Raises:
        DataError: there are none, or the source does not exist.
    """
    if data.source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not _NOT_STDLIB & set(path.relative_to(root).parts[:-1])]
    else:
        path = Path(data.source).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = [entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith(".")]
        else:
            files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if not files:
        raise DataError(
            f"The corpus {data.source!r} has no files.",
            meaning="There is nothing to train on.",
            remedy="Give data.source as 'stdlib', a file, a directory, or a glob that matches files.",
        )
    return sorted(files)


def documents(data: DataSpec, path: Path) -> Iterator[str]:
    """The documents of one file.

    Raises:
        DataError: the file cannot be read, or lacks the field.
    """
    kind = data.format if data.format != "auto" else _SUFFIXES.get(path.suffix.lower(), "text")
    try:
        match kind:
            case "jsonl":
                yield from _jsonl(path, data.field)
            case "parquet":
                yield from _parquet(path, data.field)
            case _:
                # Sources of other encodings exist; a replaced character is better than a lost corpus.
                yield path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror or error}.",
            meaning="The corpus would not be the same as on other heads, so nothing was started.",
            remedy="Make the file readable, or take it out of data.source.",
        ) from error


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise _bad(path, number, f"is longer than {MAX_LINE_BYTES >> 20} MiB")
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise _bad(path, number, f"is not JSON ({error})") from None
            if not isinstance(entry, dict) or field not in entry:
                keys = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
                raise _bad(path, number, f"has no field {field!r} (it has: {keys})")
            if not isinstance(entry[field], str):
                raise _bad(path, number, f"has a {type(entry[field]).__name__} in field {field!r}, not a string")
            yield entry[field]


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path} is Parquet, and pyarrow is not installed.",
            remedy="Install it with: pip install 'swarm[parquet]'.",
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(
                    f"{path} has no column {field!r} (it has: {names}).",
                    remedy="Set data.field to the column with the text.",
                )
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[field]):
                for value in batch.column(0):
                    text = value.as_py()
                    if text is not None:
                        yield str(text)
    except pyarrow.lib.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {error}.", remedy="Take it out of data.source.") from None


def _bad(path: Path, number: int, reason: str) -> DataError:
    return DataError(
        f"Line {number} of {path} {reason}.",
        meaning="The corpus cannot be used as it is.",
        remedy="Correct the line, or set data.field to the field with the text.",
    )
