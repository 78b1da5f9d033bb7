"""Token files: split, digest, cache."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from swarm.config.spec import DataSpec, ModelSpec
from swarm.data import corpus as corpus_module
from swarm.data import open_corpus, sources
from swarm.errors import DataError
from tests.data.corpora import TINY, jsonl, text_folder


def build_digest(source: str, cache: str) -> str:
    return open_corpus(DataSpec(source=source), TINY, Path(cache)).digest


def test_few_documents_are_split_by_position_with_the_tail_held_out(tmp_path):
    data = text_folder(tmp_path / "texts", ["a" * 59, "b" * 39])
    corpus = open_corpus(data.model_copy(update={"validation_share": 0.2}), TINY, tmp_path / "cache")
    whole = b"a" * 59 + b"\0" + b"b" * 39 + b"\0"
    assert corpus.train.tobytes() == whole[:80]
    assert corpus.validation.tobytes() == whole[80:]
    assert (corpus.train_tokens, corpus.validation_tokens) == (80, 20)


def test_many_documents_are_held_out_whole_and_about_as_many_as_asked(tmp_path):
    texts = [f"doc{number:05d}" for number in range(2000)]
    data = jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    corpus = open_corpus(data.model_copy(update={"validation_share": 0.1}), TINY, tmp_path / "cache")
    train = corpus.train.tobytes().decode().split("\0")[:-1]
    held_out = corpus.validation.tobytes().decode().split("\0")[:-1]
    assert sorted(train + held_out) == texts
    assert train == sorted(train)
    # Five standard deviations of a binomial(2000, 0.1).
    assert abs(len(held_out) - 200) < 67


def test_empty_documents_leave_no_separators(tmp_path):
    data = text_folder(tmp_path / "texts", ["", "abcd" * 10, ""])
    corpus = open_corpus(data, TINY.model_copy(update={"context": 1}), tmp_path / "cache")
    assert (np.asarray(corpus.train) == 0).sum() + (np.asarray(corpus.validation) == 0).sum() == 1


def test_tokens_are_memory_mapped_in_the_smallest_width(tmp_path):
    data = text_folder(tmp_path / "texts", ["x" * 400])
    narrow = open_corpus(data, TINY, tmp_path / "cache")
    wide = open_corpus(data, TINY.model_copy(update={"vocab_size": 257}), tmp_path / "cache")
    assert isinstance(narrow.train, np.memmap)
    assert (narrow.train.dtype, wide.train.dtype) == (np.dtype("u1"), np.dtype("<u2"))
    assert not narrow.train.flags.writeable
    assert narrow.train.tolist() == wide.train.tolist()


def test_a_corpus_is_found_again_and_not_built_again(tmp_path, monkeypatch):
    data = text_folder(tmp_path / "texts", ["x" * 400])
    first = open_corpus(data, TINY, tmp_path / "cache")
    monkeypatch.setattr(corpus_module._Build, "run", lambda *_: pytest.fail("built again"))
    assert open_corpus(data, TINY, tmp_path / "cache").digest == first.digest


def test_a_changed_file_makes_another_corpus(tmp_path):
    data = text_folder(tmp_path / "texts", ["x" * 400])
    first = open_corpus(data, TINY, tmp_path / "cache")
    (tmp_path / "texts" / "00000.txt").write_text("y" * 401)
    assert open_corpus(data, TINY, tmp_path / "cache").digest != first.digest


def test_another_tokenizer_in_the_same_file_makes_another_corpus(tmp_path):
    data = text_folder(tmp_path / "texts", ["ab" * 100])
    data = data.model_copy(update={"tokenizer": str(tmp_path / "tokenizer.json")})
    digests = set()
    for words in ({"a": 1, "b": 2}, {"a": 2, "b": 1}):
        tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
        tokenizer.pre_tokenizer = Split("", "isolated")
        tokenizer.save(data.tokenizer)
        digests.add(open_corpus(data, TINY, tmp_path / "cache").digest)
    assert len(digests) == 2


@pytest.mark.parametrize("damage", ["meta.json", "train.bin", "validation.bin"])
def test_a_cache_that_is_not_whole_is_built_again(tmp_path, damage):
    data = text_folder(tmp_path / "texts", ["x" * 400])
    first = open_corpus(data, TINY, tmp_path / "cache")
    tokens = first.train.tobytes()
    path = next((tmp_path / "cache").glob(f"*/{damage}"))
    path.write_bytes(path.read_bytes()[:-1])
    again = open_corpus(data, TINY, tmp_path / "cache")
    assert (again.digest, again.train.tobytes()) == (first.digest, tokens)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_what_a_killed_build_left_is_removed_and_a_living_one_is_let_be(tmp_path):
    data = text_folder(tmp_path / "texts", ["x" * 400])
    cache = tmp_path / "cache"

    def killed() -> None:
        corpus_module.documents = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        open_corpus(data, TINY, cache)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    (abandoned,) = cache.iterdir()
    with corpus_module._work_folder(cache) as living:
        open_corpus(data, TINY, cache)
        assert living.exists()
        assert not abandoned.exists()
    assert [entry.name.startswith(".") for entry in cache.iterdir()] == [False]


def test_processes_that_build_at_once_agree_and_leave_one_corpus(tmp_path):
    data = text_folder(tmp_path / "texts", [f"document {number} " * 20 for number in range(200)])
    arguments = [(data.source, str(tmp_path / "cache"))] * 3 + [(data.source, str(tmp_path / "elsewhere"))]
    with multiprocessing.get_context("fork").Pool(4) as pool:
        digests = pool.starmap(build_digest, arguments)
    assert len(set(digests)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_digest_does_not_depend_on_where_the_files_are(tmp_path):
    texts = [f"document {number}" for number in range(60)]
    one, two = (text_folder(tmp_path / name, texts) for name in ("one", "two"))
    assert build_digest(one.source, str(tmp_path / "c1")) == build_digest(two.source, str(tmp_path / "c2"))


def test_an_empty_corpus_is_refused(tmp_path):
    data = text_folder(tmp_path / "texts", ["", ""])
    with pytest.raises(DataError, match=r"has no text: files read: 2"):
        open_corpus(data, TINY, tmp_path / "cache")


def test_a_corpus_shorter_than_a_window_names_both_lengths(tmp_path):
    data = text_folder(tmp_path / "texts", ["x" * 8])
    with pytest.raises(DataError, match=r"has 9 tokens, fewer than two windows of 5"):
        open_corpus(data, TINY, tmp_path / "cache")


def test_two_windows_are_enough(tmp_path):
    corpus = open_corpus(text_folder(tmp_path / "texts", ["x" * 9]), TINY, tmp_path / "cache")
    assert (corpus.train_tokens, corpus.validation_tokens) == (5, 5)


def test_a_share_that_holds_no_document_out_still_holds_out_a_window(tmp_path):
    data = jsonl(tmp_path / "c.jsonl", [{"text": "x" * 9}] * 60)
    corpus = open_corpus(data.model_copy(update={"validation_share": 1e-4}), TINY, tmp_path / "cache")
    assert (corpus.train_tokens, corpus.validation_tokens) == (595, 5)


@pytest.mark.parametrize("long", range(0, 60, 7))
def test_one_document_that_outweighs_the_others_does_not_move_the_share(tmp_path, long):
    texts = ["x" * (20_000 if number == long else 99) for number in range(60)]
    data = jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    corpus = open_corpus(data.model_copy(update={"validation_share": 0.1}), TINY, tmp_path / "cache")
    assert corpus.train_tokens + corpus.validation_tokens == 20_001 + 59 * 100
    assert 0.05 <= corpus.validation_tokens / 25_901 <= 0.2


def test_pieces_of_a_document_have_no_separator_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 16)
    text = "some words " * 40
    corpus = open_corpus(text_folder(tmp_path / "texts", [text]), TINY, tmp_path / "cache")
    assert corpus.train.tobytes() + corpus.validation.tobytes() == text.encode() + b"\0"


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    size = 32 * 2**20
    with (tmp_path / "big.txt").open("wb") as file:
        for _ in range(32):
            file.write(b"words of a long text\n" * (2**20 // 21))
    tracemalloc.start()
    try:
        open_corpus(DataSpec(source=str(tmp_path / "big.txt")), TINY, tmp_path / "cache")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 4


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    data = jsonl(tmp_path / "c.jsonl", [{"text": "ok"}, {"body": "x"}])
    with pytest.raises(DataError, match="Line 2"):
        open_corpus(data, TINY, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_a_data_error_with_a_remedy(tmp_path, monkeypatch):
    data = text_folder(tmp_path / "texts", ["x" * 400])

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"No space left on device.*Make room"):
        open_corpus(data, TINY, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_standard_library_is_a_corpus(tmp_path):
    model = ModelSpec()
    corpus = open_corpus(DataSpec(), model, tmp_path)
    total = corpus.train_tokens + corpus.validation_tokens
    assert total > 5_000_000
    assert 0.02 < corpus.validation_tokens / total < 0.1
