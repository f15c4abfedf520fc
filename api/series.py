"""Down-sampling of curves: pure.

Invariants: what is left is a subset of what was there, in its order, with first and last point; no more than the
points asked for (but at least 4); the smallest and the largest value of every bucket are among them, so a peak of one
step is still seen in a curve of 10,000. A stretch without any value leaves one empty point, so that charts show a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# First, last, and one bucket's two extremes.
MIN_POINTS = 4


def keep(values: Sequence[float | None], points: int) -> list[int]:
    """Indices of the points to keep, ascending, at most max(points, MIN_POINTS)."""
    n = len(values)
    points = max(points, MIN_POINTS)
    if n <= points:
        return list(range(n))
    numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    buckets = (points - 2) // 2
    edges = np.linspace(1, n - 1, buckets + 1).astype(np.int64)
    kept = {0, n - 1}
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        kept.update(_extremes(numbers[start:end], int(start)))
    return sorted(kept)


def _extremes(bucket: NDArray[np.float64], start: int) -> tuple[int, ...]:
    if np.isnan(bucket).all():
        return (start,)
    return start + int(np.nanargmin(bucket)), start + int(np.nanargmax(bucket))


def downsample(
    x: Sequence[float], values: Sequence[float | None], points: int
) -> tuple[list[float], list[float | None]]:
    """The kept points of one curve. `x` and `values` have one length."""
    kept = keep(values, points)
    return [x[i] for i in kept], [values[i] for i in kept]
