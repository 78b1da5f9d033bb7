"""The byte tokenizer, a tokenizer.json, and the ways in which one is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from swarm.config.spec import DataSpec, ModelSpec
from swarm.data import tokenizer_digest
from swarm.data.tokenizers import load_tokenizer
from swarm.errors import DataError
from tests.data.corpora import TINY

WORDS = {"[UNK]": 0, "the": 1, "swarm": 2, "trains": 3, "</s>": 4}


def saved(path: Path, words: dict[str, int]) -> Path:
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    return saved(tmp_path / "tokenizer.json", WORDS)


def test_bytes_are_their_own_token_ids():
    tokenizer = load_tokenizer(DataSpec(), TINY)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 0)


def test_a_tokenizer_file_gives_its_ids_and_its_end_of_text(file):
    tokenizer = load_tokenizer(DataSpec(tokenizer=str(file), tokenizer_sha256=tokenizer_digest(file)), TINY)
    assert tokenizer.encode("the swarm learns").tolist() == [1, 2, 0]
    assert (tokenizer.vocab_size, tokenizer.separator) == (5, 4)


def test_another_tokenizer_than_the_runs_is_refused(file):
    digest = tokenizer_digest(file)
    file.write_text(file.read_text().replace("swarm", "crowd"))
    with pytest.raises(DataError, match=f"has the digest {tokenizer_digest(file)[:16]}, the run's has {digest[:16]}"):
        load_tokenizer(DataSpec(tokenizer=str(file), tokenizer_sha256=digest), TINY)


def test_a_tokenizer_larger_than_the_model_is_refused_with_the_size_it_needs(file):
    small = ModelSpec(vocab_size=4, d_model=8, layers=1, heads=1, kv_heads=1, stages=1)
    with pytest.raises(
        DataError, match=r"token ids up to 4, the model only up to 3\. .*Set model\.vocab_size to 5 or more"
    ):
        load_tokenizer(DataSpec(tokenizer=str(file)), small)


def test_gaps_in_the_vocabulary_count(file):
    saved(file, WORDS | {"</s>": 400})
    with pytest.raises(DataError, match=r"token ids up to 400, the model only up to 255.* model\.vocab_size to 401"):
        load_tokenizer(DataSpec(tokenizer=str(file)), TINY)


def test_truncation_and_padding_in_the_file_are_not_followed(file):
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(file))
    assert load_tokenizer(DataSpec(tokenizer=str(file)), TINY).encode("the swarm trains").tolist() == [1, 2, 3]


def test_a_vocabulary_without_end_of_text_has_no_separator(file):
    saved(file, {word: number for word, number in WORDS.items() if word != "</s>"})
    assert load_tokenizer(DataSpec(tokenizer=str(file)), TINY).separator is None


def test_a_lone_surrogate_is_a_question_mark_to_both(file):
    assert load_tokenizer(DataSpec(), TINY).encode("\ud800").tolist() == [ord("?")]
    assert load_tokenizer(DataSpec(tokenizer=str(file)), TINY).encode("\ud800 the").tolist() == [0, 1]


def test_a_missing_package_says_which_extra_to_install(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"tokenizers, which is not installed.* pip install 'swarm\[tokenizers\]'"):
        load_tokenizer(DataSpec(tokenizer=str(file)), TINY)


def test_a_missing_tokenizer_and_one_that_is_none_are_named(tmp_path):
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*absent\.json: No such file"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "absent.json")), TINY)
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*odd\.json"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "odd.json")), TINY)
