"""Curves through measured points: linear pieces, and powers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.curve import Curve, Places, PowerCurve

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


above = st.floats(1e-3, 1e6)


@given(st.dictionaries(st.integers(1, 10**6), above, min_size=1, max_size=6), st.integers(1, 2 * 10**6))
def test_measured_points_are_met_and_others_lie_between_their_neighbours(points: dict[int, float], x: int) -> None:
    curve = PowerCurve(list(points.items()))
    assert all(curve.at(known) == pytest.approx(y) for known, y in points.items())
    left, right = max((p for p in points if p <= x), default=None), min((p for p in points if p >= x), default=None)
    if left is not None and right is not None:
        low, high = sorted((points[left], points[right]))
        assert low * (1 - 1e-9) <= curve.at(x) <= high * (1 + 1e-9)
    elif left is None and right is not None:
        assert 0 < curve.at(x) <= points[right] * (1 + 1e-9)
    elif left is not None:
        assert curve.at(x) >= points[left] * (1 - 1e-9)


def test_a_power_is_itself_everywhere() -> None:
    curve = PowerCurve([(10, 3 * 10**1.5), (1000, 3 * 1000**1.5)])
    for x in (1, 50, 1000, 20_000):
        assert curve.at(x) == pytest.approx(3 * x**1.5)
    assert PowerCurve([(4, 7.0)]).at(100) == 7.0


def test_a_prefill_between_two_lengths_is_nearer_than_on_a_straight_line() -> None:
    """Seconds that this repository's embedded model took, each the least of five; those of every other length given."""
    measured = {256: 0.0143, 512: 0.027, 1024: 0.0544, 2048: 0.1376, 4096: 0.3906}
    given = [(length, measured[length]) for length in (256, 1024, 4096)]
    power, straight = PowerCurve(given), Curve(given)
    assert straight.at(2048) > 1.2 * measured[2048]
    for length in (512, 2048):
        assert power.at(length) == pytest.approx(measured[length], rel=0.07)


def test_points_must_be_there_once_and_above_zero() -> None:
    for points in ([], [(1.0, 0.0)], [(0.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)]):
        with pytest.raises(ValueError, match="a power curve needs"):
            PowerCurve(points)
