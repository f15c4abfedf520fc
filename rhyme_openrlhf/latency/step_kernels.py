"""`StepModel.seconds` and `StepModel.covers` of many steps at once, compiled: for who asks for hundreds in a decision.

The same formulas in the same order, so answers are the same to the last bit (tests/latency/test_step_kernels.py).
Invariant: nothing here is decided otherwise than in `step_model.py` and `curve.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.latency.curve import Curve, line

# CRC-32 of that module, as CALLED_SOURCES of speculation/draft_step.py.
CALLED_SOURCES = 835642825

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


def begins(counts: Iterable[int]) -> NDArray[np.int64]:
    """Where each of so many things begins that stand one behind the other, and where the last ends."""
    return np.cumsum([0, *counts])


@njit(cache=True)
def step_seconds(plain, verify, padded, least, bits, running, contexts, drafts, judged):  # type: ignore[no-untyped-def]
    """Seconds of steps, and row and column of the first of them that was not covered by what was measured (-1 and -1:
    all are, or they are not `judged`).

    `contexts` has a column for each of `running` and `drafts`; those with more than `bits` bits stand for the middle of
    those that have their leading bits.
    """
    found = np.empty(contexts.shape)
    outside = (-1, -1)
    for column in range(running.size):
        samples, drafted = running[column], drafts[column]
        verifies = drafted > 0 and verify.running.size > 0
        at = _rows(padded, samples + drafted) if drafted else samples
        family = verify if verifies else plain
        by = samples if verifies else at
        left, right = _around(family.running, 0, family.running.size, by)
        reach = _reach(family, verifies, at, by) if judged else np.inf
        for row in range(contexts.shape[0]):
            context = _middle(contexts[row, column], bits)
            if verifies:
                low, high = _of_rows(verify, left, at, context), _of_rows(verify, right, at, context)
            else:
                low, high = _at(plain.curves, left, context), _at(plain.curves, right, context)
            seconds = _line(family.running[left], low, family.running[right], high, by)
            found[row, column] = max(seconds, least)
            if context > reach and outside[0] < 0:
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
def _of_rows(verify, place, rows, context):  # type: ignore[no-untyped-def]
    left, right = _around(verify.rows, verify.begins[place], verify.begins[place + 1], rows)
    low, high = _at(verify.curves, left, context), _at(verify.curves, right, context)
    return _line(verify.rows[left], low, verify.rows[right], high, rows)


@njit(cache=True)
def _middle(context, bits):  # type: ignore[no-untyped-def]
    drop = 0
    while context >> drop >= 1 << bits:
        drop += 1
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
def _at(curves, number, x):  # type: ignore[no-untyped-def]
    """`Curve.at`."""
    first, last = curves.begins[number], curves.begins[number + 1] - 1
    xs, ys = curves.xs, curves.ys
    if x <= xs[first]:
        return max(ys[first] - curves.below[number] * (xs[first] - x), 0.0)
    if x >= xs[last]:
        return ys[last] + curves.above[number] * (x - xs[last])
    right = first + 1
    while xs[right] <= x:
        right += 1
    left = right - 1
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])
