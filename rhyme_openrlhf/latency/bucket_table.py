"""Step seconds of many steps at once, looked up by context bucket: for who asks for hundreds of steps in a decision.

Invariants: an answer is that of `seconds` for the bucket's step, which must be alike for all contexts of a bucket; no
more than MOST_ROWS kinds of step are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# Leading bits of the context that tell buckets apart: neighbours differ by 1/16 to 1/8, where step times differ less.
CONTEXT_BITS = 4
# Kinds of step (samples, drafts) kept: of some three hundred buckets each, so 10 MB.
MOST_ROWS = 4096
# Buckets of contexts below 2 ** 24, and rows to begin with; both grow.
_BUCKETS, _ROWS = (24 - CONTEXT_BITS + 1) << CONTEXT_BITS, 64

# Seconds of steps: samples and draft tokens of each column, contexts with a row for each of several steps of a column.
SecondsOfMany = Callable[[Sequence[int], NDArray[np.int64], Sequence[int]], NDArray[np.float64]]


class BucketTable:
    """Answers of `seconds(running, context, drafts)`."""

    def __init__(self, seconds: Callable[[int, int, int], float]) -> None:
        self._seconds = seconds
        self._rows: dict[tuple[int, int], int] = {}
        self._known = np.full((_ROWS, _BUCKETS), np.nan)

    def of(self, running: Sequence[int], contexts: NDArray[np.int64], drafts: Sequence[int]) -> NDArray[np.float64]:
        """As `SecondsOfMany`."""
        drop = np.maximum(np.frexp(contexts)[1] - CONTEXT_BITS - 1, 0)
        buckets = (drop << CONTEXT_BITS) + (contexts >> drop)
        steps = list(zip(running, drafts, strict=True))
        try:
            rows = [self._rows[step] for step in steps]
        except KeyError:
            if len(self._rows) + sum(step not in self._rows for step in set(steps)) > MOST_ROWS:
                self._rows.clear()
                self._known.fill(np.nan)
            rows = [self._rows.setdefault(step, len(self._rows)) for step in steps]
        self._grow(len(self._rows), int(buckets.max()) + 1)
        found: NDArray[np.float64] = self._known[rows, buckets]
        unknown = np.isnan(found)
        if unknown.any():
            cells = buckets + np.array(rows) * self._known.shape[1]
            # Many of them are the same: scenarios differ little, and what only others have is asked with one sample.
            first = np.flatnonzero(unknown)[np.unique(cells[unknown], return_index=True)[1]]
            for at, column in zip(*(axis.tolist() for axis in np.divmod(first, len(rows))), strict=True):
                asked = self._seconds(running[column], int(contexts[at, column]), drafts[column])
                self._known[rows[column], buckets[at, column]] = asked
            found = self._known[rows, buckets]
        return found

    def _grow(self, rows: int, buckets: int) -> None:
        have = self._known.shape
        if rows > have[0] or buckets > have[1]:
            larger = np.full((max(2 * rows, have[0]), max(buckets, have[1])), np.nan)
            larger[: have[0], : have[1]] = self._known
            self._known = larger
