"""Microbatches depend on (seed, step, index) and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from swarm.config.spec import RunSpec
from swarm.data import Corpus, Sampler

CORPUS = Corpus(np.arange(50_000, dtype="<u2"), np.arange(1000, dtype="<u2"), "digest")
FIELDS = {
    "model": {"context": 16},
    "batch": {"sequences": 8, "microbatches": 4},
    "evaluation": {"sequences": 8},
}


def sampler(seed: int = 7, corpus: Corpus = CORPUS) -> Sampler:
    return Sampler(RunSpec.parse(FIELDS | {"seed": seed}), corpus)


def test_a_microbatch_is_windows_of_consecutive_tokens():
    tokens = sampler().microbatch(3, 1)
    assert (tokens.shape, tokens.dtype) == ((2, 17), np.int64)
    assert (np.diff(tokens, axis=1) == 1).all()


def test_any_head_draws_the_same_microbatch():
    assert np.array_equal(sampler().microbatch(12, 3), sampler().microbatch(12, 3))


def test_the_draw_is_pinned_to_the_bit():
    # Changing these numbers changes every run: peers of two versions would train on different data.
    assert sampler(seed=0).microbatch(1, 0)[:, 0].tolist() == [36115, 17103]


@pytest.mark.parametrize("other", [(8, 12, 3), (7, 13, 3), (7, 12, 2), (7, 3, 12)])
def test_another_seed_step_or_index_draws_other_windows(other):
    seed, step, index = other
    assert not np.array_equal(sampler().microbatch(12, 3), sampler(seed).microbatch(step, index))


def test_windows_cover_the_training_part_up_to_its_ends():
    small = Corpus(np.arange(20, dtype="u1"), np.arange(17, dtype="u1"), "digest")
    drawn = sampler(corpus=small)
    starts = {int(start) for step in range(40) for start in drawn.microbatch(step, 0)[:, 0]}
    assert starts == {0, 1, 2, 3}


def test_validation_windows_are_fixed_and_reach_from_the_first_token_to_the_last():
    windows = np.concatenate([sampler(seed).validation(index) for seed in (1, 2) for index in range(4)])
    assert np.array_equal(windows[:8], windows[8:])
    assert (windows[0, 0], windows[7, -1]) == (0, 999)
    assert (np.diff(windows[:8, 0]) > 0).all()


def test_a_held_out_part_of_one_window_is_enough():
    one = Corpus(np.arange(20, dtype="u1"), np.arange(17, dtype="u1"), "digest")
    assert (sampler(corpus=one).validation(3) == np.arange(17)).all()
