"""Down-sampling of curves: pure.

Invariants: what is left is a subset of what was there, in its order, with first and last point; no more than the
points asked for (but at least 4); the smallest and the largest value of every bucket are among them, so a peak of one
step is still seen in a curve of 10,000. A stretch without any value leaves one empty point, so that charts show a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# None, or in an array NaN, is a point without a value.
Values = Sequence[float | None] | NDArray[np.float64]

# First, last, and one bucket's two extremes.
MIN_POINTS = 4


def keep(values: Values, points: int) -> list[int]:
    """Indices of the points to keep, ascending, at most max(points, MIN_POINTS)."""
    n = len(values)
    points = max(points, MIN_POINTS)
    if n <= points:
        return list(range(n))
    numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    buckets = (points - 2) // 2
    edges = np.linspace(1, n - 1, buckets + 1).astype(np.int64)
    starts, widths = edges[:-1], np.diff(edges)
    # A row for each bucket, as wide as the widest; all at once, because there are hundreds.
    within = np.arange(widths.max())
    inside = within < widths[:, None]
    cells = numbers[np.minimum(starts[:, None] + within, n - 1)]
    absent = ~inside | np.isnan(cells)
    # The first cell where a bucket has no value: then both are the start.
    smallest = np.where(absent, np.inf, cells).argmin(axis=1)
    largest = np.where(absent, -np.inf, cells).argmax(axis=1)
    kept = np.concatenate(([0, n - 1], starts + smallest, starts + largest))
    return [int(i) for i in np.unique(kept)]


def downsample(
    x: Sequence[float] | NDArray[np.float64], values: Values, points: int
) -> tuple[list[float], list[float | None]]:
    """The kept points of one curve. `x` and `values` have one length."""
    kept = keep(values, points)
    numbers = np.array(values, dtype=np.float64)[kept].tolist()
    return np.array(x, dtype=np.float64)[kept].tolist(), [None if math.isnan(one) else one for one in numbers]
