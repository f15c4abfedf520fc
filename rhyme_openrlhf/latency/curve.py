"""A piecewise linear curve through measured points: the shape that every part of the latency model has (PAT 4.2).

Invariants: at a measured x it gives the measured y; between two it is linear; outside them it goes on from the nearest
point with the slope of the two outermost points, but never downwards away from them (a negative slope there is noise:
more work is not faster), and never below zero.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np


class Curve:
    """y over x."""

    __slots__ = ("_slope_above", "_slope_below", "xs", "ys")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """`points`: (x, y) in any order, each x once, at least one. Raises ValueError otherwise."""
        ordered = sorted(points)
        self.xs = [float(x) for x, _ in ordered]
        self.ys = [float(y) for _, y in ordered]
        if not ordered or len(set(self.xs)) != len(self.xs):
            raise ValueError("a curve needs at least one point, and each x once")
        self._slope_below = self._slope(0, 1)
        self._slope_above = self._slope(-2, -1)

    def _slope(self, left: int, right: int) -> float:
        if len(self.xs) == 1:
            return 0.0
        return max((self.ys[right] - self.ys[left]) / (self.xs[right] - self.xs[left]), 0.0)

    def reaches(self, x: float) -> bool:
        """Whether `x` lies not above all measured points. Below all of them there is not far to go: sizes end at 0."""
        return x <= self.xs[-1]

    def at(self, x: float) -> float:
        """The curve's value at `x`."""
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return max(ys[0] - self._slope_below * (xs[0] - x), 0.0)
        if x >= xs[-1]:
            return ys[-1] + self._slope_above * (x - xs[-1])
        right = bisect_right(xs, x)
        left = right - 1
        return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])

    def at_all(self, xs: np.ndarray) -> np.ndarray:
        """`at` each of `xs`."""
        below = np.maximum(self.ys[0] - self._slope_below * (self.xs[0] - xs), 0.0)
        above = self.ys[-1] + self._slope_above * (xs - self.xs[-1])
        within = np.interp(xs, self.xs, self.ys)
        found: np.ndarray = np.where(xs < self.xs[0], below, np.where(xs > self.xs[-1], above, within))
        return found
