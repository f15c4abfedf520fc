"""The test accepts a right sampler about as often as it should, and catches a biased one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.verify.chi_square import chi_square, tail

PROBABILITIES = np.array([0.4, 0.3, 0.2, 0.09, 0.01, 1e-9, 0.0])


def counts(probabilities: np.ndarray, samples: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).multinomial(samples, probabilities / probabilities.sum()).tolist()


# Importing scipy takes longer than the deadline of one example.
@settings(deadline=None)
@given(st.floats(0.0, 3000.0), st.integers(1, 2000))
def test_the_tail_is_scipys(statistic: float, degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert tail(statistic, degrees) == pytest.approx(float(stats.chi2.sf(statistic, degrees)), rel=1e-6, abs=1e-12)


def test_a_right_sampler_has_every_p_value_about_equally_often() -> None:
    p_values = [chi_square(counts(PROBABILITIES, 3000, seed), PROBABILITIES).p_value or 0.0 for seed in range(400)]
    assert 0.4 < np.mean(p_values) < 0.6
    assert 0.02 < np.mean(np.array(p_values) < 0.1) < 0.2
    assert min(p_values) > 1e-4


@pytest.mark.parametrize(("token", "too_often"), [(0, 0.1), (3, 0.04), (5, 0.02)])
def test_a_sampler_that_accepts_a_draft_too_often_is_caught(token: int, too_often: float) -> None:
    """Common, rare and impossible tokens: each sampled more often than the model would."""
    biased = PROBABILITIES * (1 - too_often)
    biased[token] += too_often
    result = chi_square(counts(biased, 3000, seed=1), PROBABILITIES)
    assert result.p_value is not None and result.p_value < 1e-4


def test_a_token_that_cannot_occur_counts_even_alone() -> None:
    result = chi_square([700, 300, 30], [0.7, 0.3, 0.0])
    assert result.p_value is not None and result.p_value < 1e-4


def test_one_class_can_be_compared_with_nothing() -> None:
    assert chi_square([1000, 0], [1.0, 0.0]).p_value is None
    assert chi_square([0, 0], [0.5, 0.5]).p_value is None


@pytest.mark.parametrize("spoilt", [[math.nan, 0.5], [0.5, math.nan], [math.nan] * 2, [math.inf, 0.5], [0.0, 0.0]])
def test_probabilities_that_are_no_numbers_give_no_chance(spoilt: list[float]) -> None:
    """Not "nothing to compare", which is what one class has."""
    p_value = chi_square([500, 500], spoilt).p_value
    assert p_value is not None and math.isnan(p_value)


def test_rare_values_are_one_class() -> None:
    probabilities = [0.5, 0.47, *[0.001] * 30]
    result = chi_square(counts(np.array(probabilities), 1000, seed=3), probabilities)
    assert result.degrees == 2 and result.observations == 1000
