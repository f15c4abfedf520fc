"""Measured points in, straight lines between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.curve import Curve, Places

points = st.dictionaries(st.integers(0, 1000), st.floats(0.001, 10), min_size=1, max_size=6).map(
    lambda d: list(d.items())
)


@given(points)
def test_measured_points_are_answered_as_measured(measured: list[tuple[int, float]]) -> None:
    curve = Curve(measured)
    for x, y in measured:
        assert curve.at(x) == pytest.approx(y)


@given(points, st.floats(0, 500))
def test_outside_it_never_falls_away_from_the_edge(measured: list[tuple[int, float]], distance: float) -> None:
    curve = Curve(measured)
    assert curve.at(curve.xs[-1] + distance) >= curve.ys[-1]
    assert 0 <= curve.at(curve.xs[0] - distance) <= curve.ys[0]


def test_between_two_points_it_is_straight() -> None:
    curve = Curve([(20, 4.0), (10, 2.0)])
    assert curve.at(15) == 3.0
    assert curve.at(30) == 6.0
    assert curve.reaches(10) and curve.reaches(20) and not curve.reaches(21)


@pytest.mark.parametrize("measured", [[], [(1, 2.0), (1, 3.0)]])
def test_no_points_or_one_twice_is_refused(measured: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="at least one point"):
        Curve(measured)


@given(points, st.lists(st.integers(-100, 1200)))
def test_many_values_are_those_of_one_by_one_to_the_last_bit(measured: list[tuple[int, float]], xs: list[int]) -> None:
    curve = Curve(measured)
    assert curve.at_all(Places.of(curve.xs, np.array(xs, dtype=np.int64))).tolist() == [curve.at(x) for x in xs]


@given(points, st.lists(st.floats(0.001, 10), min_size=6, max_size=6), st.integers(-100, 1200))
def test_curves_through_the_same_xs_are_those_of_one_by_one_to_the_last_bit(
    measured: list[tuple[int, float]], others: list[float], x: int
) -> None:
    second = [(at, y) for (at, _), y in zip(measured, others, strict=False)]
    both = Curve([(at, np.array([y, other])) for (at, y), (_, other) in zip(measured, second, strict=True)])
    assert both.at(x).tolist() == [Curve(measured).at(x), Curve(second).at(x)]
