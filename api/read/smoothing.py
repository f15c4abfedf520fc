"""Smoothing of curves: pure.

An exponential moving average whose beginning is corrected (as in TensorBoard and Adam): the first value stands for
itself, and not for the start at 0. `weight` is the share of the average that a point keeps from the points before it.

Invariants:
- A smoothed curve has the same points. A point without a value has none in it either; the average goes on behind it.
- Weight 0 changes nothing.
- Every smoothed value lies between the smallest and the largest value up to it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# The weights on offer: each averages over about 1 / (1 - weight) points.
WEIGHTS = (0.6, 0.9, 0.98)
MOST_WEIGHT = 0.999


def smoothed(values: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    """Return the moving average of `values`, where NaN is no value. Raises ValueError for a weight outside [0, 1)."""
    if not 0 <= weight < 1:
        raise ValueError(f"a weight is from 0 to below 1, got {weight}")
    if weight == 0:
        return values
    found, total, all_weights = [], 0.0, 0.0
    for value in values.tolist():
        if math.isnan(value):
            found.append(value)
            continue
        total = weight * total + (1 - weight) * value
        all_weights = weight * all_weights + (1 - weight)
        found.append(total / all_weights)
    return np.array(found, np.float64)
