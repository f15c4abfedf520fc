"""Curves through measured points: piecewise linear, or a power of x between any two points.

The piecewise linear curve is the shape of every part of the step model (PAT 4.2). The power is for prefills, which grow
with x and with its square: over a factor of four that is nearly a power. A straight line between two points would be
far above it (docs/measurements/moves.md, "Moves and reallocation").

Invariants:
- At a measured x both give the measured y.
- Outside the points the linear curve goes on with the slope of the two outermost points. It never falls away from them,
  and never below zero.
- Outside the points the power curve goes on with their power, at least level and at most with the square. Other slopes
  are noise: more work is not faster, and nothing in a prefill grows faster than attention.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# A number, or an array of the values that many curves have at the same x.
Y: TypeAlias = Any


class Places(NamedTuple):
    """Xs of curves through the same known xs: the piece that each lies on, and how far behind the piece's begin."""

    pieces: NDArray[np.int64]
    beyond: Floats

    @staticmethod
    def of(known: Sequence[float], xs: NDArray[Any]) -> Places:
        """Return the places of `xs` among `known`, which ascend."""
        pieces = np.searchsorted(known, xs, side="right")
        return Places(pieces, xs - np.array([known[0], *known], dtype=np.float64)[pieces])


class Curve:
    """y over x. Where each y is an array of numbers, many curves through points at the same xs."""

    __slots__ = ("_begins", "_slopes", "_values", "xs", "ys")

    def __init__(self, points: Sequence[tuple[float, Y]]) -> None:
        """`points`: (x, y) in any order, each x once, at least one. Raises ValueError otherwise."""
        ordered = sorted(points, key=lambda point: point[0])
        self.xs = xs = [float(x) for x, _ in ordered]
        self.ys = ys = [y for _, y in ordered]
        if not ordered or len(set(xs)) != len(xs):
            raise ValueError("a curve needs at least one point, and each x once")
        pairs = range(1, len(ordered))
        slopes = [(ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1]) for at in pairs] or [0.0 * ys[0]]
        # Of the piece before the first point, those between two points, and the piece behind the last.
        self._slopes = [_at_least_zero(slopes[0]), *slopes[: len(pairs)], _at_least_zero(slopes[-1])]
        self._begins, self._values = [xs[0], *xs], [ys[0], *ys]

    def reaches(self, x: float) -> bool:
        """Return whether `x` is at most the largest measured point; below all points the way to 0 is short."""
        return x <= self.xs[-1]

    def at(self, x: float) -> Y:
        """Return the curve's value at `x`."""
        return self.on_piece(bisect_right(self.xs, x), x)

    def at_all(self, places: Places) -> Floats:
        """Return the values of a single curve at all `places` of its xs."""
        pieces, beyond = places
        return _at_least_zero(np.array(self._values)[pieces] + np.array(self._slopes)[pieces] * beyond)

    def on_piece(self, piece: int, x: float | NDArray[Any]) -> Y:
        """Return the value at `x`, which has `piece` points at or below it; for an array of xs, one value a curve."""
        return _at_least_zero(self._values[piece] + self._slopes[piece] * (x - self._begins[piece]))


def _at_least_zero(value: Y) -> Y:
    return np.maximum(value, 0.0) if isinstance(value, np.ndarray) else max(value, 0.0)


# Attention over a prompt takes the square of its length.
MOST_POWER = 2.0


class PowerCurve:
    """y over x, both above 0."""

    __slots__ = ("_powers", "_xs", "_ys")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """`points`: (x, y) in any order, each x once, at least one. Raises ValueError otherwise."""
        ordered = sorted(points)
        self._xs = [float(x) for x, _ in ordered]
        self._ys = [float(y) for _, y in ordered]
        if not ordered or len(set(self._xs)) != len(ordered) or min(self._xs + self._ys) <= 0:
            raise ValueError("a power curve needs at least one point, each x once, and all above 0")
        # Between neighbours; of the first and the last two again outside of them.
        powers = [
            math.log(self._ys[right] / self._ys[right - 1]) / math.log(self._xs[right] / self._xs[right - 1])
            for right in range(1, len(ordered))
        ] or [0.0]
        first, last = (min(max(power, 0.0), MOST_POWER) for power in (powers[0], powers[-1]))
        self._powers = [first, *powers, last]

    def at(self, x: float) -> float:
        """Return the curve's value at `x`, above 0."""
        right = bisect_right(self._xs, x)
        left = max(right - 1, 0)
        power = self._powers[right]
        return float(self._ys[left] * (x / self._xs[left]) ** power)
