"""Where documents come from, and what is said of those that cannot be read."""

from __future__ import annotations

import json
import os
import sys
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
    """The documents, put together from their pieces."""
    texts = [""]
    for path in source_files(data):
        for piece in documents(data, path):
            texts[-1] += piece.text
            if piece.last:
                texts.append("")
    return texts[:-1]


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


def test_hidden_folders_are_not_part_of_a_corpus(tmp_path):
    data = text_folder(tmp_path / "texts", ["a"])
    text_folder(tmp_path / "texts" / ".git", ["objects"])
    text_folder(tmp_path / "texts" / "more", ["b"])
    assert read(data) == ["a", "b"]


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path, monkeypatch):
    data = text_folder(tmp_path / "texts", ["a"])
    closed = tmp_path / "texts" / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refusing(path):
        if Path(path) == closed:
            raise PermissionError(13, os.strerror(13), str(closed))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=rf"cannot be listed \({closed}: Permission denied\)"):
        source_files(data)


def test_the_home_of_nobody_is_refused():
    with pytest.raises(DataError, match=r"'~nobody-has-this-name/x' cannot be listed"):
        source_files(DataSpec(source="~nobody-has-this-name/x"))


def test_a_glob_and_a_single_file_are_sources_too(tmp_path):
    text_folder(tmp_path, ["a", "b"])
    assert read(DataSpec(source=str(tmp_path / "*1.txt"))) == ["b"]
    assert read(DataSpec(source=str(tmp_path / "00000.txt"))) == ["a"]


def test_bytes_that_are_not_utf8_are_replaced_not_fatal(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert read(DataSpec(source=str(tmp_path))) == ["caf�"]


@pytest.mark.parametrize("size", [8, 9, 64])
def test_long_documents_come_in_pieces_cut_before_white_space(tmp_path, monkeypatch, size):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", size)
    text = "one two\nthree  four " + "x" * 40 + "\u00e9 five\n"
    data = text_folder(tmp_path / "texts", [text])
    (tmp_path / "texts" / "b.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert read(data) == [text, text]
    for path in source_files(data):
        found = list(documents(data, path))
        assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
        assert max(len(piece.text) for piece in found) <= 3 * size
        assert all(piece.text[:1] in " \nxé" for piece in found[1:])


def test_a_short_document_is_one_piece(tmp_path):
    data = text_folder(tmp_path / "texts", ["one two\nthree "])
    assert list(documents(data, source_files(data)[0])) == [("one two\nthree ", True)]


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
        (b"[" * 100_000, "is not JSON"),
        (b'["text"]', "has no field 'text' .it has: list."),
        (b'{"text": 5}', "has a value of type int in field 'text', not a string"),
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


def test_a_parquet_column_of_something_else_names_the_row(tmp_path):
    pq.write_table(pa.table({"text": [None, b"raw"]}), tmp_path / "c.parquet")
    with pytest.raises(
        DataError, match=r"Row 2 of .*c\.parquet has a value of type bytes in field 'text', not a string"
    ):
        read(DataSpec(source=str(tmp_path)))


def test_parquet_without_its_package_says_which_extra_to_install(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "c.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pyarrow is not installed.* pip install 'swarm\[parquet\]'"):
        read(DataSpec(source=str(tmp_path)))


def test_a_line_with_many_fields_names_the_first_few(tmp_path):
    data = jsonl(tmp_path / "c.jsonl", [{f"f{number:04d}": 1 for number in range(1000)}])
    with pytest.raises(DataError, match=r"\(it has: f0000, .*, f0009 and 990 more\)"):
        read(data)


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
