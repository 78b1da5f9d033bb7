"""AdaptiveDeadline: median + k MAD with a floor and a ceiling."""

import pytest

from swarm.core.deadline import AdaptiveDeadline


def deadline(*seen: float, **options: float) -> float:
    it = AdaptiveDeadline(3.0, 4.0, 5, **options)
    for duration in seen:
        it.observe(duration)
    return it.timeout_s


def test_the_floor_holds_before_anything_was_seen_and_while_all_is_quick():
    assert deadline() == 3.0
    assert deadline(1.0, 1.0, 1.1) == 3.0


def test_a_slow_and_noisy_path_gets_its_median_plus_k_deviations():
    assert deadline(4.0, 5.0, 6.0) == 5.0 + 4.0 * 1.0


def test_one_outlier_changes_nothing():
    assert deadline(5.0, 5.0, 5.0, 5.0, 500.0) == 5.0


def test_only_the_window_counts():
    assert deadline(*[100.0] * 50, *[4.0] * 5) == 4.0


def test_the_ceiling_holds_whatever_was_seen():
    assert deadline(50.0, 60.0, 70.0, ceiling_s=30.0) == 30.0


def test_an_impossible_deadline_is_refused():
    with pytest.raises(ValueError, match="floor_s=0"):
        AdaptiveDeadline(0)
