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
    """y over x. `slope_below` and `slope_above`: with which it goes on outside of its points."""

    __slots__ = ("slope_above", "slope_below", "xs", "ys")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """`points`: (x, y) in any order, each x once, at least one. Raises ValueError otherwise."""
        ordered = sorted(points)
        self.xs = [float(x) for x, _ in ordered]
        self.ys = [float(y) for _, y in ordered]
        if not ordered or len(set(self.xs)) != len(self.xs):
            raise ValueError("a curve needs at least one point, and each x once")
        self.slope_below = self._slope(0, 1)
        self.slope_above = self._slope(-2, -1)

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
            return max(ys[0] - self.slope_below * (xs[0] - x), 0.0)
        if x >= xs[-1]:
            return ys[-1] + self.slope_above * (x - xs[-1])
        right = bisect_right(xs, x)
        left = right - 1
        return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])

    def at_all(self, xs: np.ndarray) -> np.ndarray:
        """`at` each of `xs`, which ascend."""
        begin, end = np.searchsorted(xs, self.xs[0]), np.searchsorted(xs, self.xs[-1], side="right")
        found = np.empty(len(xs))
        found[:begin] = np.maximum(self.ys[0] - self.slope_below * (self.xs[0] - xs[:begin]), 0.0)
        found[begin:end] = np.interp(xs[begin:end], self.xs, self.ys)
        found[end:] = self.ys[-1] + self.slope_above * (xs[end:] - self.xs[-1])
        return found


def through(left: float, low: float, right: float, high: float, x: float) -> float:
    """`Curve([(left, low), (right, high)]).at(x)` to the last bit, without making it; if both are one point, level."""
    if left == right:
        return low
    if left < x < right:
        return low + (high - low) * (x - left) / (right - left)
    slope = max((high - low) / (right - left), 0.0)
    return max(low - slope * (left - x), 0.0) if x <= left else high + slope * (x - right)


def line(left: float, low: float, right: float, high: float, x: float) -> float:
    """The curve through (left, low) and (right, high) at `x`; if both are one point, it is level."""
    if left == right:
        return low
    slope = (high - low) / (right - left)
    if left <= x <= right:
        return low + slope * (x - left)
    slope = max(slope, 0.0)
    return max(low - slope * (left - x), 0.0) if x < left else high + slope * (x - right)
