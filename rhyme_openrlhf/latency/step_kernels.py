"""`StepModel.seconds` and `StepModel.covers` of many steps at once, compiled: for who asks for hundreds in a decision.

The same formulas in the same order, so answers are the same to the last bit (tests/latency/test_step_kernels.py).
Invariant: nothing here is decided otherwise than in `step_model.py` and `curve.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.latency.curve import Curve, line

# CRC-32 of that module. Numba's cache notices a change of this file only, so a change of that one has to change this
# one too (tests/latency/test_step_kernels.py says the number).
CALLED_SOURCES = 2956833266

_line = njit(cache=True)(line)


class Curves(NamedTuple):
    """Curves one behind the other: the points of curve n are those from `begins[n]` on to `begins[n + 1]`."""

    begins: NDArray[np.int64]
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]
    below: NDArray[np.float64]
    above: NDArray[np.float64]

    @staticmethod
    def of(curves: Sequence[Curve]) -> Curves:
        """These, in this order."""
        return Curves(
            begins([len(curve.xs) for curve in curves]),
            np.array([x for curve in curves for x in curve.xs]),
            np.array([y for curve in curves for y in curve.ys]),
            np.array([curve.slope_below for curve in curves]),
            np.array([curve.slope_above for curve in curves]),
        )


class Family(NamedTuple):
    """Curves over the context: one for each of `running`, or where steps verify drafts, for each of its rows.

    `begins`: of the rows of each of `running` among `rows` and `curves`; without drafts the rows are `running`.
    """

    running: NDArray[np.int64]
    begins: NDArray[np.int64]
    rows: NDArray[np.int64]
    curves: Curves

    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """All that it is made of: to pass arrays to compiled code takes a quarter of what nested tuples of them do."""
        return (self.running, self.begins, self.rows, *self.curves)


def begins(counts: Iterable[int]) -> NDArray[np.int64]:
    """Where each of so many things begins that stand one behind the other, and where the last ends."""
    return np.cumsum([0, *counts])


@njit(cache=True)
def step_seconds(padded, least, bits, running, contexts, drafts, judged, *arrays):  # type: ignore[no-untyped-def]
    """Seconds of steps, and row and column of the first of them that was not covered by what was measured (-1 and -1:
    all are, or they are not `judged`).

    `contexts` has a column for each of `running` and `drafts`; those with more than `bits` bits stand for the middle of
    those that have their leading bits. `arrays`: of the families without drafts and with (`Family.arrays`).
    """
    plain = Family(arrays[0], arrays[1], arrays[2], Curves(arrays[3], arrays[4], arrays[5], arrays[6], arrays[7]))
    verify = Family(
        arrays[8], arrays[9], arrays[10], Curves(arrays[11], arrays[12], arrays[13], arrays[14], arrays[15])
    )
    found = np.empty(contexts.shape)
    outside = (-1, -1)
    middles = np.empty(contexts.shape[0], dtype=np.int64)
    low, high, other = np.empty((3, contexts.shape[0]))
    for column in range(running.size):
        samples, drafted = running[column], drafts[column]
        verifies = drafted > 0 and verify.running.size > 0
        at = _rows(padded, samples + drafted) if drafted else samples
        by = samples if verifies else at
        for row in range(middles.size):
            middles[row] = _middle(contexts[row, column], bits)
        if verifies:
            left, right = _around(verify.running, 0, verify.running.size, by)
            fewer, more = verify.running[left], verify.running[right]
            reach = _reach(verify, True, at, by) if judged else np.inf
            _of_rows(verify, left, at, middles, low, other)
            _of_rows(verify, right, at, middles, high, other)
        else:
            left, right = _around(plain.running, 0, plain.running.size, by)
            fewer, more = plain.running[left], plain.running[right]
            reach = _reach(plain, False, at, by) if judged else np.inf
            _at_all(plain.curves, left, middles, low)
            _at_all(plain.curves, right, middles, high)
        for row in range(middles.size):
            found[row, column] = max(_line(fewer, low[row], more, high[row], by), least)
            if middles[row] > reach and outside[0] < 0:
                outside = (row, column)
    return found, outside


@njit(cache=True)
def _reach(family, verifies, rows, by):  # type: ignore[no-untyped-def]
    """The longest context of such a step that was measured; -1: no such step was."""
    if not family.running[0] <= by <= family.running[-1]:
        return -1.0
    curve = _nearest(family.running, 0, family.running.size, by)
    if verifies:
        begin, end = family.begins[curve], family.begins[curve + 1]
        if rows > family.rows[end - 1]:
            return -1.0
        curve = _nearest(family.rows, begin, end, rows)
    return family.curves.xs[family.curves.begins[curve + 1] - 1]


@njit(cache=True)
def _of_rows(verify, place, rows, contexts, found, other):  # type: ignore[no-untyped-def]
    """With so many rows at each of `contexts`; `other`: room for as many numbers."""
    left, right = _around(verify.rows, verify.begins[place], verify.begins[place + 1], rows)
    _at_all(verify.curves, left, contexts, found)
    _at_all(verify.curves, right, contexts, other)
    for row in range(contexts.size):
        found[row] = _line(verify.rows[left], found[row], verify.rows[right], other[row], rows)


@njit(cache=True)
def _middle(context, bits):  # type: ignore[no-untyped-def]
    # The bits of what lies above the leading ones; whole numbers of this size are exact as floats.
    drop = math.frexp(context >> bits)[1]
    return ((context >> drop) << drop) + ((1 << drop) >> 1)


@njit(cache=True)
def _rows(padded, rows):  # type: ignore[no-untyped-def]
    at = np.searchsorted(padded, rows)
    return padded[at] if at < padded.size else rows


@njit(cache=True)
def _around(known, begin, end, x):  # type: ignore[no-untyped-def]
    """The places of the two that `x` lies between, or of the two outermost on its side; twice the same if x is
    known."""
    at = begin
    while at < end and known[at] < x:
        at += 1
    if at < end and known[at] == x:
        return at, at
    right = min(max(at, begin + 1), end - 1)
    return max(right - 1, begin), right


@njit(cache=True)
def _nearest(known, begin, end, x):  # type: ignore[no-untyped-def]
    left, right = _around(known, begin, end, x)
    return right if abs(known[right] - x) < abs(known[left] - x) else left


@njit(cache=True)
def _at_all(curves, number, contexts, found):  # type: ignore[no-untyped-def]
    """`Curve.at` each of `contexts`."""
    first, last = curves.begins[number], curves.begins[number + 1] - 1
    xs, ys, below, above = curves.xs, curves.ys, curves.below[number], curves.above[number]
    for row in range(contexts.size):
        x = contexts[row]
        if x <= xs[first]:
            found[row] = max(ys[first] - below * (xs[first] - x), 0.0)
        elif x >= xs[last]:
            found[row] = ys[last] + above * (x - xs[last])
        else:
            right = first + 1
            while xs[right] <= x:
                right += 1
            left = right - 1
            found[row] = ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])


@njit(cache=True)
def along(xs, ys, asked, least):  # type: ignore[no-untyped-def]
    """`Curve.at_all` of the curve through these points (their xs ascend), where nothing is below `least`."""
    last = xs.size - 1
    below = above = 0.0
    if last > 0:
        below = max((ys[1] - ys[0]) / (xs[1] - xs[0]), 0.0)
        above = max((ys[last] - ys[last - 1]) / (xs[last] - xs[last - 1]), 0.0)
    found = np.empty(asked.size)
    at = 0
    for place in range(asked.size):
        x = asked[place]
        if x < xs[0]:
            value = max(ys[0] - below * (xs[0] - x), 0.0)
        elif x > xs[last]:
            value = ys[last] + above * (x - xs[last])
        else:
            while at < last and xs[at + 1] <= x:
                at += 1
            value = ys[at]
            if x != xs[at]:
                value += (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at]) * (x - xs[at])
        found[place] = max(value, least)
    return found
