"""Down-sampling of curves: pure.

Invariants:

- The result is a subset of the points in their order, including the first and the last point.
- It has at most the requested number of points (but at least 4).
- It contains the smallest and the largest value of every bucket. A peak of one step therefore stays visible in a curve
  of 10,000.
- A stretch without values leaves one empty point, so that charts show a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# None, or NaN in an array, is a point without a value.
Values = Sequence[float | None] | NDArray[np.float64]

# First and last point, and the two extremes of one bucket.
MIN_POINTS = 4


def keep(values: Values, points: int) -> list[int]:
    """Return the indices of the points to keep, ascending, at most max(points, MIN_POINTS)."""
    n = len(values)
    points = max(points, MIN_POINTS)
    if n <= points:
        return list(range(n))
    numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    buckets = (points - 2) // 2
    edges = np.linspace(1, n - 1, buckets + 1).astype(np.int64)
    starts, widths = edges[:-1], np.diff(edges)
    # One row per bucket, as wide as the widest; all at once, because there are hundreds.
    within = np.arange(widths.max())
    inside = within < widths[:, None]
    cells = numbers[np.minimum(starts[:, None] + within, n - 1)]
    absent = ~inside | np.isnan(cells)
    # Both are the first cell if a bucket has no value.
    smallest = np.where(absent, np.inf, cells).argmin(axis=1)
    largest = np.where(absent, -np.inf, cells).argmax(axis=1)
    kept = np.concatenate(([0, n - 1], starts + smallest, starts + largest))
    return [int(i) for i in np.unique(kept)]


def downsample(
    x: Sequence[float] | NDArray[np.float64], values: Values, points: int
) -> tuple[list[float], list[float | None]]:
    """Return the kept points of one curve. `x` and `values` have the same length."""
    kept = keep(values, points)
    numbers = np.array(values, dtype=np.float64)[kept].tolist()
    return np.array(x, dtype=np.float64)[kept].tolist(), [None if math.isnan(one) else one for one in numbers]
