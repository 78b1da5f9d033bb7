"""The byte tokenizer, a tokenizer.json, and the three ways in which one is refused."""

from __future__ import annotations

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


@pytest.fixture
def file(tmp_path) -> Path:
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


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
    with pytest.raises(DataError, match=r"has 5 tokens, the model only 4\. Set model\.vocab_size to 5 or more"):
        load_tokenizer(DataSpec(tokenizer=str(file)), small)


def test_a_missing_tokenizer_and_one_that_is_none_are_named(tmp_path):
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*absent\.json: No such file"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "absent.json")), TINY)
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(DataError, match=r"Cannot read the tokenizer .*odd\.json"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "odd.json")), TINY)
