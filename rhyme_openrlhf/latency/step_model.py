"""Seconds of one decode step: of how many samples, with how much context, verifying how many draft tokens.

Plain steps follow PAT 4.2: for each profiled number of running samples a piecewise linear curve over the total context;
between two of them, linear. A step that verifies drafts adds RLHFSpec 5.2's two terms, attention by context and the
feed-forward part by tokens computed, as a second family of curves: over the context, for each profiled number of rows
(running samples + draft tokens). It is a family of its own because a verifying step also does things that a plain one
does not (rejection sampling), so that the first draft token costs more than the second.

Invariants: at a profiled point the answer is the measured one, or the mean of those points that the engine's padding
makes the same step; rows are first padded as the engine pads them, so the answer is a staircase in draft tokens where
the engine's time is one; outside of what was measured the nearest edge goes on with its slope, and `covers` says so.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency import step_kernels
from rhyme_openrlhf.latency.curve import Curve, line
from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject

# Families of curves at one context that are kept, each by all numbers of rows: some thousand floats, so some MB. Steps
# of different numbers of samples lie between the same two.
MOST_KNOWN = 256
# Contexts that differ by less are one. Draft counts of one stair are measured with all but the same context, and the
# slope between two such points is noise, with which a curve would go on beyond them.
SAME_CONTEXT = 1.25
# Of the quickest measured step: that of one sample without context hardly takes less.
LEAST_SHARE = 0.5


class StepModel:
    """The fitted model of one profile."""

    def __init__(self, profile: Profile) -> None:
        self._padded = profile.padded_rows
        self._least = LEAST_SHARE * min(point.seconds for point in profile.steps)
        plain: dict[int, list[tuple[float, float]]] = defaultdict(list)
        verify: dict[int, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for point in profile.steps:
            measured = (point.context, point.seconds)
            if point.drafts == 0:
                plain[point.running].append(measured)
            else:
                verify[point.running][self.rows(point.running, point.drafts)].append(measured)
        self._running = sorted(plain)
        self._running_known = np.array(self._running, dtype=np.float64)
        self._plain = {running: Curve(points) for running, points in plain.items()}
        self._verify = {
            running: {rows: Curve(_merged(points)) for rows, points in by_rows.items()}
            for running, by_rows in verify.items()
        }
        self._verified_running = sorted(self._verify)
        self._verified_rows = {running: sorted(by_rows) for running, by_rows in self._verify.items()}
        # By samples (0: what none of them verifies is made of), context and rows.
        self._known: dict[tuple[int, int, int], np.ndarray] = {}
        self._rows_known: dict[int, np.ndarray] = {}

    def rows(self, running: int, drafts: int) -> int:
        """Tokens that the engine computes in the step, with its padding."""
        rows = running + drafts
        at = bisect_left(self._padded, rows)
        return self._padded[at] if at < len(self._padded) else rows

    def first_rows(self, least: int) -> int:
        """The fewest tokens of a step for which the engine computes `least` or more."""
        at = bisect_left(self._padded, least)
        if at == len(self._padded):
            return max(least, self._padded[-1] + 1) if self._padded else least
        return self._padded[at - 1] + 1 if at else 1

    def next_stair(self, running: int, drafts: int) -> int:
        """The most draft tokens that cost as much as `drafts`."""
        return self.rows(running, drafts) - running

    def covers(self, running: int, context: int, drafts: int) -> bool:
        """Whether the answer lies between measured points, or below them with less context."""
        if not (drafts and self._verify):
            at = self.rows(running, drafts) if drafts else running
            return _within(self._running, at) and self._plain[_nearest(self._running, at)].reaches(context)
        nearest = _nearest(self._verified_running, running)
        rows = self.rows(running, drafts)
        return (
            _within(self._verified_running, running)
            and rows <= self._verified_rows[nearest][-1]
            and self._verify[nearest][_nearest(self._verified_rows[nearest], rows)].reaches(context)
        )

    def seconds(self, running: int, context: int, drafts: int) -> float:
        """Seconds of a step of `running` samples with `context` tokens in all and `drafts` draft tokens in all.

        Without profiled verification a step of n rows is taken to cost what n running samples with that context cost.
        Raises ValueError for a step without samples or of negative size.
        """
        if running < 1 or context < 0 or drafts < 0:
            raise ValueError(f"no step has {running} samples, {context} tokens of context and {drafts} drafts")
        if drafts and self._verify:
            rows = self.rows(running, drafts)
            values = [
                (b, _between([(r, self._verify[b][r]) for r in _around(self._verified_rows[b], rows)], rows, context))
                for b in _around(self._verified_running, running)
            ]
            return max(_line(values, running), self._least)
        at = self.rows(running, drafts) if drafts else running
        return max(_between([(b, self._plain[b]) for b in _around(self._running, at)], at, context), self._least)

    def seconds_of(
        self,
        running: NDArray[np.int64],
        contexts: NDArray[np.int64],
        drafts: NDArray[np.int64],
        bits: int,
        judged: bool = False,
    ) -> tuple[NDArray[np.float64], tuple[int, int] | None]:
        """`seconds` of many steps; and if that is `judged`, row and column of one that is not covered, if any.

        `contexts` has a column for each of `running` and `drafts`. Contexts of more than `bits` bits stand for the
        middle of those with the same leading ones.
        """
        padded, *arrays = self._compiled
        found, outside = step_kernels.step_seconds(
            padded, self._least, bits, running, contexts, drafts, judged, *arrays
        )
        return found, None if outside[0] < 0 else outside

    @functools.cached_property
    def _compiled(self) -> tuple[NDArray[np.generic], ...]:
        """What the compiled form is made of: the padded rows, and curves of steps without drafts and with."""
        rows_of = [self._verified_rows[b] for b in self._verified_running]
        verify_curves = [self._verify[b][r] for b in self._verified_running for r in self._verified_rows[b]]
        plain_running = _whole(self._running)
        plain = step_kernels.Family(
            plain_running,
            step_kernels.begins([1] * len(plain_running)),
            plain_running,
            step_kernels.Curves.of([self._plain[b] for b in self._running]),
        )
        verify = step_kernels.Family(
            _whole(self._verified_running),
            step_kernels.begins(map(len, rows_of)),
            _whole([rows for of_family in rows_of for rows in of_family]),
            step_kernels.Curves.of(verify_curves),
        )
        return (_whole(self._padded), *plain.arrays(), *verify.arrays())

    def table(self, running: int, context: int, most: int) -> np.ndarray:
        """`seconds` with 0 to `most` draft tokens, float64[most + 1], at the price of a few of them."""
        seconds = np.empty(most + 1)
        seconds[0] = self.seconds(running, context, 0)
        if not most:
            return seconds
        if not self._verify:
            seconds[1:] = self._by_samples(context, running + most)[running : running + most]
            return seconds
        around = _around(self._verified_running, running)
        curves = [self._by_rows(b, context, running + most)[running : running + most] for b in around]
        if len(curves) == 1:
            seconds[1:] = np.maximum(curves[0], self._least)
        else:
            slope = (curves[1] - curves[0]) / (around[1] - around[0])
            if running < around[0] or running > around[1]:
                slope = np.maximum(slope, 0)
            nearest = 1 if running > around[1] else 0
            seconds[1:] = np.maximum(curves[nearest] + slope * (running - around[nearest]), self._least)
        return seconds

    def _by_samples(self, context: int, most: int) -> np.ndarray:
        """Seconds of steps with 1 to at least `most` rows that cost as much as so many samples."""
        size = _power_of_two(most)
        key = (0, context, size)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            values = np.array([self._plain[b].at(context) for b in self._running])
            known = self._known[key] = step_kernels.along(
                self._running_known, values, self._all_rows(size), self._least
            )
        return known

    def _by_rows(self, running: int, context: int, most: int) -> np.ndarray:
        """Seconds of verifying steps with 1 to at least `most` rows by the family of a profiled number of samples."""
        size = _power_of_two(most)
        key = (running, context, size)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            curve = Curve([(rows, self._verify[running][rows].at(context)) for rows in self._verified_rows[running]])
            known = self._known[key] = curve.at_all(self._all_rows(size))
        return known

    def _all_rows(self, most: int) -> np.ndarray:
        """What the engine computes for 1 to `most` (a power of two) rows, with its padding."""
        known = self._rows_known.get(most)
        if known is None:
            known = np.arange(1, most + 1)
            if self._padded:
                stairs = np.asarray(self._padded)
                at = np.searchsorted(stairs, known)
                known = np.where(at < len(stairs), stairs[np.minimum(at, len(stairs) - 1)], known)
            self._rows_known[most] = known
        return known


def compile_seconds_of() -> None:
    """Have `StepModel.seconds_of` compiled, or loaded from Numba's cache: that takes seconds, which no decision should
    wait."""
    one = np.ones(1, dtype=np.int64)
    _least_model().seconds_of(one, one[None], one, 1)


def compile_table() -> None:
    """The same of `StepModel.table`."""
    _least_model().table(1, 1, 1)


def _least_model() -> StepModel:
    return StepModel(Profile(Subject("", "", "float32", 1), "derived", (StepPoint(1, 1, 0, 1.0, 0.0, 1),)))


def _power_of_two(least: int) -> int:
    """The first one from `least` on."""
    return 1 << (least - 1).bit_length()


def _whole(numbers: Sequence[int]) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def _merged(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(context, seconds), those of the same context as their mean."""
    groups: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if groups and point[0] < SAME_CONTEXT * groups[-1][0][0]:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [(fmean(context for context, _ in group), fmean(seconds for _, seconds in group)) for group in groups]


def _around(known: Sequence[int], x: float) -> Sequence[int]:
    """The two of `known` (ascending) that `x` lies between, or the two outermost on its side; one if x is known."""
    at = bisect_left(known, x)
    if at < len(known) and known[at] == x:
        return known[at : at + 1]
    right = min(max(bisect_right(known, x), 1), len(known) - 1)
    return known[max(right - 1, 0) : right + 1]


def _within(known: Sequence[int], x: float) -> bool:
    return known[0] <= x <= known[-1]


def _nearest(known: Sequence[int], x: float) -> int:
    around = _around(known, x)
    return around[-1] if abs(around[-1] - x) < abs(around[0] - x) else around[0]


def _between(curves: Sequence[tuple[int, Curve]], x: float, context: float) -> float:
    return _line([(at, curve.at(context)) for at, curve in curves], x)


def _line(points: Sequence[tuple[int, float]], x: float) -> float:
    """`Curve(points).at(x)` of one or two points that ascend, at a fraction of its price."""
    return line(*points[0], *points[-1], x)
