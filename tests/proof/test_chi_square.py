"""The test accepts a right sampler about as often as it should, and catches a biased one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.proof.chi_square import alike, chi_square, tail

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


def test_two_samples_of_one_distribution_are_alike_and_of_two_are_not() -> None:
    chance = np.random.default_rng(3)
    shares = np.array([0.5, 0.3, 0.15, 0.04, 0.005, 0.005])
    one, other = (chance.multinomial(total, shares).tolist() for total in (1000, 900))
    found = alike(one, other)
    assert found.p_value is not None and found.p_value > 0.01 and found.observations == 1900
    shifted = chance.multinomial(1000, np.roll(shares, 1)).tolist()
    assert (alike(one, shifted).p_value or 0) < 1e-50
    # As scipy.stats.chi2_contingency([[30, 70], [50, 50]], correction=False).
    assert alike([30, 70], [50, 50]).p_value == pytest.approx(0.00389, abs=1e-5)


@pytest.mark.parametrize("pair", [([5, 0], [9, 0]), ([0, 0], [5, 4]), ([], [])])
def test_where_nothing_can_be_compared_there_is_no_chance(pair: tuple[list[int], list[int]]) -> None:
    assert alike(*pair).p_value is None


def test_false_alarms_are_as_rare_as_they_say() -> None:
    chance = np.random.default_rng(5)
    shares = np.array([0.6, 0.2, 0.1, 0.05, 0.03, 0.01, 0.01])
    p_values = [
        alike(chance.multinomial(400, shares).tolist(), chance.multinomial(500, shares).tolist()).p_value or 1.0
        for _ in range(400)
    ]
    assert 5 <= sum(p < 0.05 for p in p_values) <= 40
