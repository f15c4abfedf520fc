"""How likely a draft token is to be accepted: learnt while the run goes (RLHFSpec 5.2's F, for drafts without logits).

A history draft has no draft logit. What it has: its source, its confidence (the share of the history's continuations
that go this way), how long a match it follows from, and how the sample's last drafts fared. Each combination of these,
coarsely, is a cell that counts how often its tokens were accepted, given that those before them were.

Invariants: probabilities never fall with confidence (isotonic regression over the cells of a row); a cell that has seen
little answers as its source and confidence do in all, and those, before anything was seen, as PRIOR; `forget` halves
what was seen, because a policy update changes what is accepted; tokens behind a rejected one teach nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

# Upper edges of the classes: few, so that each is seen often. A confidence of 1 (nobody in the history went elsewhere)
# is by far the most frequent and has a class of its own.
CONFIDENCE_EDGES = (0.3, 0.5, 0.7, 0.85, 0.999)
MATCH_EDGES = (5, 8, 12, 16, 24)
RECENT_EDGES = (0.25, 0.5, 0.75, 0.95)
CONFIDENCES = len(CONFIDENCE_EDGES) + 1
MATCHES = len(MATCH_EDGES) + 1
RECENTS = len(RECENT_EDGES) + 1
# Acceptance by class of confidence before anything was seen: lower than recorded runs show, so that the first drafts
# are short and not wasted.
PRIOR = (0.3, 0.4, 0.55, 0.7, 0.8, 0.85)
# Tokens that the prior counts as, and the source's own figures for a cell.
PRIOR_WEIGHT = 20.0
CELL_WEIGHT = 20.0


def confidence_class(confidence: float) -> int:
    """Class of a confidence in [0, 1]."""
    return bisect_right(CONFIDENCE_EDGES, confidence)


def match_class(length: int) -> int:
    """Class of the number of tokens matched."""
    return bisect_right(MATCH_EDGES, length)


def recent_class(acceptance: float) -> int:
    """Class of the share of the sample's last draft tokens that were accepted."""
    return bisect_right(RECENT_EDGES, acceptance)


class AcceptanceModel:
    """Cells for some sources; `table` is what a drafter looks up in the step."""

    def __init__(self, sources: int) -> None:
        shape = (sources, MATCHES, RECENTS, CONFIDENCES)
        self._offered = np.zeros(shape)
        self._accepted = np.zeros(shape)
        self.table = np.empty(shape, dtype=np.float32)
        """float32[sources, MATCHES, RECENTS, CONFIDENCES]: acceptance probability by cell, as of the last `refit`."""
        self.refit()

    def observe(self, source: int, match: int, recent: int, confidences: Sequence[int], accepted: int) -> None:
        """A draft was verified: classes of its match, of its sample and of each verified token; how many were accepted.

        Raises ValueError unless 0 <= accepted <= len(confidences).
        """
        if not 0 <= accepted <= len(confidences):
            raise ValueError(f"{accepted} of {len(confidences)} draft tokens cannot be accepted")
        for place, confidence in enumerate(confidences[: accepted + 1]):
            self._offered[source, match, recent, confidence] += 1
            self._accepted[source, match, recent, confidence] += place < accepted

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
        for place in np.ndindex(*cells.shape[:3]):
            self.table[place] = isotonic(cells[place], weights[place])


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, size = pools.pop()
            both = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / both, both, size + pool[2])
        pools.append(pool)
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
