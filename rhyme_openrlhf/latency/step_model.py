"""Seconds of one decode step: of how many samples, with how much context, verifying how many draft tokens.

Plain steps follow PAT 4.2: for each profiled number of running samples a piecewise linear curve over the total context;
between two of them, linear. A step that verifies drafts adds the two terms of RLHFSpec 5.2: attention by context, and
the feed-forward part by tokens computed. They are a second family of curves over the context, one for each profiled
number of rows (running samples + draft tokens). A verifying step also does things that a plain one does not (rejection
sampling). So it needs a family of its own, in which the first draft token costs more than the second.

Each family keeps its seconds for all numbers of rows at the contexts that were queried (`_Family`). Single steps,
tables of draft tokens and many steps at once read the same numbers.

Invariants:

- At a profiled point the answer is the measured one. Points that padding makes the same step give their mean.
- Rows are first padded as the engine pads them, so the answer is a staircase where the engine's time is.
- Outside of the measured points the nearest edge continues with its slope, and `covers` says so.
"""

from __future__ import annotations

import dataclasses
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.curve import Curve, Floats, Places
from rhyme_openrlhf.latency.profile import Profile, StepPoint

Ints = NDArray[np.int64]

# Leading bits of the context that tell buckets apart: neighbours differ by 1/16 to 1/8, where step times differ less.
CONTEXT_BITS = 4
# Buckets that there are: contexts end far below 2 ** 48 tokens.
BUCKETS = (48 - CONTEXT_BITS) << CONTEXT_BITS
# Contexts that each family keeps its seconds of: some thousand floats each, so some MB.
MOST_TABLES = 256
# Contexts that differ by less count as one. Draft counts of one stair are measured with nearly the same context. The
# slope between two such points is noise, and a curve would continue with it beyond them.
SAME_CONTEXT = 1.25
# Of the quickest measured step: that of one sample without context hardly takes less.
LEAST_SHARE = 0.5


def bucket_middle(bucket: int) -> int:
    """Return the context that stands for the bucket of this number."""
    drop = max((bucket >> CONTEXT_BITS) - 1, 0)
    return ((bucket - (drop << CONTEXT_BITS)) << drop) + ((1 << drop) >> 1)


MIDDLES = np.array([bucket_middle(bucket) for bucket in range(BUCKETS)], dtype=np.int64)


def context_bucket(context: int) -> int:
    """Return the middle of the bucket that `context` falls into; small ones stand for themselves."""
    drop = (context >> (CONTEXT_BITS + 1)).bit_length()
    return bucket_middle((drop << CONTEXT_BITS) + (context >> drop))


def buckets_of(contexts: Ints) -> Ints:
    """Return the numbers of the buckets that `contexts` fall into."""
    # Whole numbers of this size are exact as floats.
    drop = np.frexp(contexts >> (CONTEXT_BITS + 1))[1]
    return (drop << CONTEXT_BITS) + (contexts >> drop)


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
        for running, by_rows in verify.items():
            if len(by_rows) == 1 and running in plain:
                # A single number of rows has no slope: all drafts beyond it would cost nothing.
                by_rows[running] = plain[running]
        self._plain = _Family({running: Curve(points) for running, points in plain.items()})
        self._verify = {
            running: _Family({rows: Curve(_merged(points)) for rows, points in by_rows.items()})
            for running, by_rows in verify.items()
        }
        self._verified_running = sorted(self._verify)
        self._stairs = np.zeros(0, dtype=np.int64)

    def rows(self, running: int, drafts: int) -> int:
        """Tokens that the engine computes in the step, with its padding."""
        rows = running + drafts
        at = bisect_left(self._padded, rows)
        return self._padded[at] if at < len(self._padded) else rows

    def first_rows(self, least: int) -> int:
        """Return the fewest tokens of a step for which the engine computes `least` or more."""
        at = bisect_left(self._padded, least)
        if at == len(self._padded):
            return max(least, self._padded[-1] + 1) if self._padded else least
        return self._padded[at - 1] + 1 if at else 1

    def covers(self, running: int, context: int, drafts: int) -> bool:
        """Return whether the answer lies between measured points, or below them with less context."""
        rows = self.rows(running, drafts) if drafts else running
        if not (drafts and self._verify):
            return self._plain.rows[0] <= rows and self._plain.covers(rows, context)
        known = self._verified_running
        return known[0] <= running <= known[-1] and self._verify[_nearest(known, running)].covers(rows, context)

    def seconds(self, running: int, context: int, drafts: int) -> float:
        """Seconds of a step of `running` samples with `context` tokens in all and `drafts` draft tokens in all.

        Without profiled verification a step of n rows is taken to cost what n running samples with that context cost.
        Raises ValueError for a step without samples or of negative size.
        """
        if running < 1 or context < 0 or drafts < 0:
            raise ValueError(f"no step has {running} samples, {context} tokens of context and {drafts} drafts")
        rows = self.rows(running, drafts) if drafts else running
        if not (drafts and self._verify):
            return max(self._plain.seconds(context, rows), self._least)
        between = Curve([(b, self._verify[b].seconds(context, rows)) for b in _around(self._verified_running, running)])
        return max(between.at(running), self._least)

    def table(self, running: int, context: int, most: int) -> Floats:
        """`seconds` with 0 to `most` draft tokens, float64[most + 1], at the price of a few of them."""
        seconds = np.empty(most + 1)
        seconds[0] = self.seconds(running, context, 0)
        if most:
            rows = self._all_rows(running + most)[running + 1 : running + most + 1]
            if self._verify:
                around = _around(self._verified_running, running)
                found = Curve([(b, self._verify[b].table(context, int(rows[-1]))[rows]) for b in around]).at(running)
            else:
                found = self._plain.table(context, int(rows[-1]))[rows]
            np.maximum(found, self._least, out=seconds[1:])
        return seconds

    def seconds_near(self, running: Ints, buckets: Ints, drafts: Ints) -> Floats:
        """`seconds` of many steps with the middles of context `buckets`, which have a column for each of `running` and
        `drafts`.
        """
        rows = running + drafts
        if self._padded:
            rows = np.where(drafts > 0, self._all_rows(int(rows.max()))[rows], running)
        verifies = (drafts > 0) if self._verify else np.zeros(0, dtype=bool)
        if not verifies.any():
            return np.maximum(self._plain.near(buckets, rows), self._least)
        found = np.empty(buckets.shape)
        plain = np.flatnonzero(~verifies)
        found[:, plain] = self._plain.near(buckets[:, plain], running[plain])
        # Columns on the same piece of the curve over samples go together.
        pieces = np.where(verifies, np.searchsorted(self._verified_running, running, side="right"), -1)
        for piece in set(pieces[verifies].tolist()):
            columns = np.flatnonzero(pieces == piece)
            around = _neighbours(self._verified_running, running[columns[0]])
            asked = buckets[:, columns], rows[columns]
            curve = Curve([(b, self._verify[b].near(*asked)) for b in around])
            found[:, columns] = curve.on_piece(bisect_right(around, running[columns[0]]), running[columns])
        return np.maximum(found, self._least)

    def _all_rows(self, most: int) -> Ints:
        """Return what the engine computes for 0 to at least `most` rows, with its padding."""
        if self._stairs.size <= most:
            rows = np.arange(_power_of_two(most + 1))
            if self._padded:
                at = np.searchsorted(self._padded, rows)
                rows = np.where(at < len(self._padded), np.array([*self._padded, 0])[at], rows)
            self._stairs = rows
        return self._stairs


class _Family:
    """Steps that differ in their rows and context: a curve over the context for each profiled number of rows."""

    def __init__(self, curves: Mapping[int, Curve]) -> None:
        self.rows = sorted(curves)
        self._curves = curves
        self._tables: dict[int, Floats] = {}
        # Of all numbers of rows from 0 on.
        self._places = Places.of(self.rows, np.arange(0))
        # By the bucket of the context and by rows, and which buckets have been asked for.
        self._near = np.empty((BUCKETS, 0))
        self._made = np.zeros(BUCKETS, dtype=bool)

    def covers(self, rows: int, context: int) -> bool:
        """Return whether `rows` rows with `context` tokens were measured, or more of both."""
        return rows <= self.rows[-1] and self._curves[_nearest(self.rows, rows)].reaches(context)

    def seconds(self, context: int, rows: int) -> float:
        """Return the seconds of one step."""
        table = self._tables.get(context)
        if table is not None and rows < table.size:
            return float(table[rows])
        return Curve([(known, self._curves[known].at(context)) for known in _around(self.rows, rows)]).at(rows)

    def table(self, context: int, most: int) -> Floats:
        """Return seconds by rows, of 0 to at least `most` of them."""
        known = self._tables.get(context)
        if known is None or known.size <= most:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            known = self._tables[context] = self._by_rows(context, _power_of_two(most + 1))
        return known

    def near(self, buckets: Ints, rows: Ints) -> Floats:
        """Return seconds with the middles of context `buckets`, which have a column for each of `rows`."""
        most = int(rows.max(initial=0))
        if self._near.shape[1] <= most:
            self._near = np.empty((BUCKETS, _power_of_two(most + 1)))
            self._made[:] = False
        made = self._made[buckets]
        if not made.all():
            for bucket in set(buckets[~made].tolist()):
                self._near[bucket] = self._by_rows(bucket_middle(bucket), self._near.shape[1])
                self._made[bucket] = True
        return self._near[buckets, rows]

    def _by_rows(self, context: int, count: int) -> Floats:
        if self._places.pieces.size != count:
            self._places = Places.of(self.rows, np.arange(count))
        return Curve([(rows, self._curves[rows].at(context)) for rows in self.rows]).at_all(self._places)


@dataclass(frozen=True)
class Quality:
    """`held_out_error`: mean |predicted / measured - 1| over `points` held out one at a time; `noise`: the median over
    all points of spread / seconds, which no model can be better than. None: no inner points."""

    held_out_error: float | None
    points: int
    noise: float


def assess(profile: Profile) -> Quality:
    """Return the quality of a profile's step points."""
    noise = statistics.median(point.spread / point.seconds for point in profile.steps)
    errors = []
    for point in _inner(profile):
        others = tuple(other for other in profile.steps if other is not point)
        model = StepModel(dataclasses.replace(profile, steps=others))
        predicted = model.seconds(point.running, point.context, point.drafts)
        errors.append(abs(predicted / point.seconds - 1))
    return Quality(statistics.fmean(errors) if errors else None, len(errors), noise)


def _inner(profile: Profile) -> list[StepPoint]:
    """Points that lie between two others of their curve over the context."""
    curves: dict[tuple[int, int], list[StepPoint]] = defaultdict(list)
    for point in profile.steps:
        curves[(point.running, point.drafts)].append(point)
    return [point for curve in curves.values() for point in sorted(curve, key=lambda p: p.context)[1:-1]]


def _power_of_two(least: int) -> int:
    """Return the first power of two from `least` on."""
    return 1 << (least - 1).bit_length()


def _merged(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(context, seconds), those of the same context as their mean."""
    groups: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if groups and point[0] < SAME_CONTEXT * groups[-1][0][0]:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [
        (statistics.fmean(context for context, _ in group), statistics.fmean(seconds for _, seconds in group))
        for group in groups
    ]


def _neighbours(known: Sequence[int], x: int) -> Sequence[int]:
    """Return the two of `known` (ascending) that `x` lies between, or the two outermost on its side."""
    right = min(max(bisect_right(known, x), 1), len(known) - 1)
    return known[max(right - 1, 0) : right + 1]


def _around(known: Sequence[int], x: int) -> Sequence[int]:
    """Return `x` alone where it is one of `known`, else its neighbours."""
    at = bisect_left(known, x)
    return known[at : at + 1] if known[at : at + 1] == [x] else _neighbours(known, x)


def _nearest(known: Sequence[int], x: float) -> int:
    """Return the one of `known` (ascending) that is nearest to `x`, the smaller one of two as near."""
    return min(known, key=lambda one: abs(one - x))
