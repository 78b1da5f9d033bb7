"""Where documents come from, and what is said of those that cannot be read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swarm.config.spec import DataSpec
from swarm.data import sources
from swarm.data.sources import documents, source_files
from swarm.errors import DataError
from tests.data.corpora import jsonl, text_folder


def read(data: DataSpec) -> list[str]:
    return [text for path in source_files(data) for text in documents(data, path)]


def test_the_standard_library_is_modules_only_without_tests_and_installed_packages():
    root = Path(sysconfig.get_paths()["stdlib"])
    files = source_files(DataSpec(source="stdlib"))
    assert root / "json" / "decoder.py" in files
    folders = {part for path in files for part in path.relative_to(root).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert {path.suffix for path in files} == {".py"}
    assert files == sorted(files)


def test_a_folder_of_text_files_is_read_in_the_order_of_their_names(tmp_path):
    data = text_folder(tmp_path / "texts", ["eins", "zwei", "drei"])
    (tmp_path / "texts" / ".hidden").write_text("not this")
    assert read(data) == ["eins", "zwei", "drei"]


def test_a_glob_and_a_single_file_are_sources_too(tmp_path):
    text_folder(tmp_path, ["a", "b"])
    assert read(DataSpec(source=str(tmp_path / "*1.txt"))) == ["b"]
    assert read(DataSpec(source=str(tmp_path / "00000.txt"))) == ["a"]


def test_bytes_that_are_not_utf8_are_replaced_not_fatal(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert read(DataSpec(source=str(tmp_path))) == ["caf�"]


def test_jsonl_gives_one_document_a_line_from_the_field_asked_for(tmp_path):
    data = jsonl(tmp_path / "c.jsonl", [{"body": "one", "id": 1}, {"body": "two"}], field="body")
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write("\n")
    assert read(data) == ["one", "two"]


def test_parquet_gives_one_document_a_row_and_skips_nulls(tmp_path):
    pq.write_table(pa.table({"text": ["one", None, "two"], "n": [1, 2, 3]}), tmp_path / "c.parquet")
    assert read(DataSpec(source=str(tmp_path))) == ["one", "two"]


def test_the_format_of_the_spec_overrides_the_suffix(tmp_path):
    (tmp_path / "c.log").write_text('{"text": "inside"}\n')
    assert read(DataSpec(source=str(tmp_path), format="jsonl")) == ["inside"]


def test_a_missing_field_names_the_file_and_the_line_and_what_is_there(tmp_path):
    data = jsonl(tmp_path / "c.jsonl", [{"text": "ok"}, {"body": "x", "id": 3}])
    with pytest.raises(DataError, match=r"Line 2 of .*c\.jsonl has no field 'text' \(it has: body, id\)"):
        read(data)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{oops", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'["text"]', "has no field 'text' .it has: list."),
        (b'{"text": 5}', "has a int in field 'text', not a string"),
    ],
)
def test_a_line_that_is_no_document_names_the_file_and_the_line(tmp_path, line, reason):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"Line 2 of .*c\.jsonl {reason}"):
        read(DataSpec(source=str(path)))


def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 2**20)
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 2**20 + b'"}\n')
    with pytest.raises(DataError, match=r"Line 1 of .* is longer than 1 MiB"):
        read(DataSpec(source=str(path)))


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet has no column 'text' \(it has: body, n\)"):
        read(DataSpec(source=str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing of the kind PAR1"])
def test_a_parquet_file_that_is_none_is_named(tmp_path, content):
    (tmp_path / "c.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"c\.parquet is not a Parquet file"):
        read(DataSpec(source=str(tmp_path)))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path, kind):
    # A directory where a file is expected fails for every user, root included.
    with pytest.raises(DataError, match=rf"Cannot read {tmp_path}: .*"):
        list(documents(DataSpec(source=str(tmp_path), format=kind), tmp_path))


@pytest.mark.parametrize("source", ["missing", "missing/*.txt", "."])
def test_a_source_without_files_is_refused(tmp_path, source):
    with pytest.raises(DataError, match="has no files"):
        source_files(DataSpec(source=str(tmp_path / source)))
