"""How likely a draft token is to be accepted: learnt while the run goes (RLHFSpec 5.2's F, for drafts without logits).

A history draft has no draft logit. What it has: its source, its confidence (the share of the history's continuations
that go this way), how many tokens match before it, and how the sample's last drafts fared. Each combination of these,
coarsely, is a cell that counts how often its tokens were accepted, given that those before them were.

Invariants: probabilities never fall with confidence (isotonic regression over the cells of a row); a cell that has seen
little answers as its source and confidence do in all, and those, before anything was seen, as PRIOR; `forget` halves
what was seen, because a policy update changes what is accepted; tokens behind a rejected one teach nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# Lower edges of the classes after the first: few, so that each is seen often. A node of a draft index with one child
# has 0.968 where it was seen once, 0.980 to 0.986 with two and three, more with more (history/lookup.py).
CONFIDENCE_EDGES = (0.3, 0.5, 0.7, 0.88, 0.972, 0.99)
MATCH_EDGES = (5, 8, 12, 16, 24)
# Of the sample's recent acceptance, in thousandths.
RECENT_EDGES = (250, 500, 750, 950)
CONFIDENCES = len(CONFIDENCE_EDGES) + 1
MATCHES = len(MATCH_EDGES) + 1
RECENTS = len(RECENT_EDGES) + 1
# Acceptance by class of confidence before anything was seen: as of an untrained drafter in the first epoch of recorded
# runs (own text and siblings), far below what history has later, so that the first drafts are short and not wasted.
PRIOR = (0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65)
# Tokens that the prior counts as, and the source's own figures for a cell.
PRIOR_WEIGHT = 20.0
CELL_WEIGHT = 20.0
# A new sample's recent acceptance, and what a draft weighs in it: the last four or so count.
FIRST_RECENT = 500
RECENT_SHARE = 4


class AcceptanceModel:
    """Cells for some sources. One caller at a time."""

    def __init__(self, sources: int) -> None:
        """`sources`: drafts come from 0 to `sources` - 1."""
        shape = (sources, MATCHES, RECENTS, CONFIDENCES)
        self._offered: Doubles = np.zeros(shape)
        self._accepted: Doubles = np.zeros(shape)
        self.table: Floats = np.empty(shape, dtype=np.float32)
        """float32[sources, MATCHES, RECENTS, CONFIDENCES]: acceptance probability by cell, as of the last `refit`."""
        self.refit()

    def learn(self, cells: Int32s, begins: Ints, numbers: Ints, verified: Ints, accepted: Ints) -> int:
        """Drafts were verified: their `numbers`, -1 for one that teaches nothing; tokens verified and accepted.

        `begins`: where each draft's tokens begin in `cells`, and where the last one's end. What was verified past a
        draft's end (dummies) teaches nothing. Returns how many tokens were verified before it.
        """
        learnt: int = _learn(self._offered, self._accepted, cells, begins, numbers, verified, accepted)
        return learnt

    def forget(self) -> None:
        """Halve what was seen: the policy was updated."""
        self._offered /= 2
        self._accepted /= 2

    def refit(self) -> None:
        """Make `table` anew from what was seen."""
        offered, accepted = self._offered.sum(axis=(1, 2)), self._accepted.sum(axis=(1, 2))
        overall = (accepted + PRIOR_WEIGHT * np.asarray(PRIOR)) / (offered + PRIOR_WEIGHT)
        cells = (self._accepted + CELL_WEIGHT * overall[:, None, None, :]) / (self._offered + CELL_WEIGHT)
        weights = self._offered + CELL_WEIGHT
        rows = (-1, CONFIDENCES)
        _isotonic_rows(cells.reshape(rows), weights.reshape(rows), self.table.reshape(rows))


@njit(cache=True)
def next_recent(recent: int, verified: int, accepted: int) -> int:
    """A sample's recent acceptance (thousandths) after so many of `verified` tokens, one at least, were accepted."""
    return recent + (1000 * accepted // verified - recent) // RECENT_SHARE


@njit(cache=True)
def _class(edges, value):  # type: ignore[no-untyped-def]
    found = 0
    while found < len(edges) and value >= edges[found]:
        found += 1
    return found


@njit(cache=True)
def class_of_recent(recent: int) -> int:
    """Of a sample's recent acceptance (thousandths), 0 to RECENTS - 1."""
    found: int = _class(RECENT_EDGES, recent)
    return found


@njit(cache=True)
def estimate(table, sources, matches, recents, lengths, confidences, cells, acceptance):  # type: ignore[no-untyped-def]
    """How likely each token of some drafts is to be accepted if those before it are, by `AcceptanceModel.table`.

    For each draft its source, tokens matched before it, its sample's recent acceptance (thousandths), its length; for
    each token, one draft after the other, the confidence that it is right if those before it are. Fills each token's
    cell (its place in the flat table) and its `acceptance`.
    """
    flat = table.reshape(table.size)
    at = 0
    for draft in range(lengths.size):
        recent = _class(RECENT_EDGES, recents[draft])
        for place in range(lengths[draft]):
            row = (sources[draft] * MATCHES + _class(MATCH_EDGES, matches[draft] + place)) * RECENTS + recent
            cell = row * CONFIDENCES + _class(CONFIDENCE_EDGES, confidences[at])
            cells[at] = cell
            acceptance[at] = flat[cell]
            at += 1


@njit(cache=True)
def _learn(offered, accepted, cells, begins, numbers, verified, hits):  # type: ignore[no-untyped-def]
    flat_offered, flat_accepted = offered.reshape(offered.size), accepted.reshape(accepted.size)
    learnt = 0
    for at in range(numbers.size):
        number = numbers[at]
        if number < 0 or number + 1 >= begins.size:
            continue
        begin = begins[number]
        seen = min(verified[at], begins[number + 1] - begin)
        for place in range(min(seen, hits[at] + 1)):
            cell = cells[begin + place]
            flat_offered[cell] += 1
            flat_accepted[cell] += place < hits[at]
        learnt += seen
    return learnt


@njit(cache=True)
def _isotonic_rows(values, weights, out):  # type: ignore[no-untyped-def]
    """Each row becomes the non-decreasing one nearest to it in weighted squares (pool adjacent violators)."""
    size = values.shape[1]
    mean, weight = np.empty(size), np.empty(size)
    until = np.empty(size, dtype=np.int64)
    for row in range(values.shape[0]):
        pools = 0
        for place in range(size):
            mean[pools], weight[pools], until[pools] = values[row, place], weights[row, place], place + 1
            while pools and mean[pools - 1] > mean[pools]:
                both = weight[pools - 1] + weight[pools]
                mean[pools - 1] = (mean[pools - 1] * weight[pools - 1] + mean[pools] * weight[pools]) / both
                weight[pools - 1], until[pools - 1] = both, until[pools]
                pools -= 1
            pools += 1
        begin = 0
        for pool in range(pools):
            out[row, begin : until[pool]] = mean[pool]
            begin = until[pool]
