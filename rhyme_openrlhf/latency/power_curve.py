"""A curve through measured points that is a power of x between any two: straight where both axes are logarithmic.

What grows with x and with its square, as a prefill does with its length, is nearly such a power over a factor of four,
while a straight line between two points lies far above it (docs/benchmarks.md, "Moves and reallocation"). Invariants:
at a measured x it gives the measured y; outside of them it goes on with the two outermost points' power, but at least
level and at most with its square: what is beyond that is noise, for more work is not faster, and nothing in a prefill
grows faster than attention does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

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
        """The curve's value at `x`, above 0."""
        right = bisect_right(self._xs, x)
        left = max(right - 1, 0)
        power = self._powers[min(right, len(self._powers) - 1)]
        return float(self._ys[left] * (x / self._xs[left]) ** power)
