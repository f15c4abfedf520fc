"""Smoothing: between the extremes, gaps stay gaps, and as the formula says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.read.smoothing import WEIGHTS, smoothed

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), max_size=60)


@given(VALUES, st.floats(0, 0.999))
def test_it_stays_between_the_extremes_and_keeps_gaps(values: list[float], weight: float) -> None:
    array = np.array(values, np.float64)
    found = smoothed(array, weight)
    assert (np.isnan(found) == np.isnan(array)).all()
    for place in np.flatnonzero(~np.isnan(array)):
        before = array[: place + 1]
        slack = 1e-9 * (1 + np.nanmax(np.abs(before)))
        assert np.nanmin(before) - slack <= found[place] <= np.nanmax(before) + slack


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.sampled_from(WEIGHTS))
def test_it_is_the_weighted_mean_of_all_points_so_far(values: list[float], weight: float) -> None:
    found = smoothed(np.array(values), weight)
    weights = weight ** np.arange(len(values))[::-1]
    assert found[-1] == pytest.approx(float(np.average(values, weights=weights)), abs=1e-6)
    assert found[0] == pytest.approx(values[0])


def test_impossible_weights_are_refused() -> None:
    for weight in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="from 0 to below 1"):
            smoothed(np.zeros(2), weight)
