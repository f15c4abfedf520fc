"""Down-sampling keeps what a person must see."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.read.downsampling import MIN_POINTS, downsample, keep

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=400)


@given(VALUES, st.integers(0, 60))
def test_what_is_kept_is_a_bounded_ordered_subset_with_ends_and_extremes(
    values: list[float | None], points: int
) -> None:
    kept = keep(values, points)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(points, MIN_POINTS)
    assert set(kept) <= set(range(len(values)))
    if values:
        assert kept[0] == 0 and kept[-1] == len(values) - 1
    there = [value for value in values if value is not None]
    if there:
        left = [values[i] for i in kept if values[i] is not None]
        assert max(left) == max(there)
        assert min(left) == min(there)


@given(VALUES)
def test_few_points_stay_as_they_are(values: list[float | None]) -> None:
    x = [float(i) for i in range(len(values))]
    assert downsample(x, values, 400) == (x, values)


def test_a_stretch_without_values_leaves_a_gap() -> None:
    values: list[float | None] = [1.0] * 500 + [None] * 500 + [2.0] * 500
    x, kept = downsample([float(i) for i in range(1500)], values, 20)
    assert None in kept
    gap = [at for at, value in zip(x, kept, strict=True) if value is None]
    assert all(500 <= at < 1000 for at in gap)


def test_one_peak_in_ten_thousand_steps_is_seen() -> None:
    values: list[float | None] = [0.0] * 10_000
    values[7_777] = 9.0
    _, kept = downsample([float(i) for i in range(10_000)], values, 100)
    assert 9.0 in kept
