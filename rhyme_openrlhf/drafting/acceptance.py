"""Estimates of how likely a draft token is accepted, learnt during the run (RLHFSpec 5.2, for drafts without logits).

A cell counts how often its tokens were accepted, given that the tokens before them were. `AcceptanceModel` is for
drafts from history. Its cell is a combination of source, confidence, matched tokens and the sample's recent acceptance.
`PositionAcceptance` is for drafts of bare tokens, as vLLM's own methods propose them. Its cell is a token's place in
the draft and the sample's recent acceptance.

Invariants:
- A cell that has seen little answers as wider cells do. They answer with the prior before anything was seen.
- Probabilities of drafts from history never fall with confidence (isotonic regression over the cells of a row).
- `forget` halves what was seen, because a policy update changes what is accepted.
- Tokens behind a rejected token teach nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting_core import core

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# Lower edges of the classes after the first: few, so that each is seen often. A node of a draft index with one child
# has 0.968 where it was seen once, 0.980 to 0.986 with two and three, more with more (csrc/search.cpp).
CONFIDENCE_EDGES = np.array((0.3, 0.5, 0.7, 0.88, 0.972, 0.99))
MATCH_EDGES = np.array((5, 8, 12, 16, 24))
# Of the sample's recent acceptance, in thousandths.
RECENT_EDGES = np.array((250, 500, 750, 950))
CONFIDENCES = CONFIDENCE_EDGES.size + 1
MATCHES = MATCH_EDGES.size + 1
RECENTS = RECENT_EDGES.size + 1
# Acceptance by class of confidence before anything was seen: of an untrained drafter in the first epoch of recorded
# runs (own text and siblings). History has far more later. So the first drafts are short and not wasted.
PRIOR = (0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65)
# Of the first token of a draft of bare tokens: between an n-gram's and a good draft model's.
POSITION_PRIOR = 0.6
# Tokens that the prior counts as, and the source's own figures for a cell.
PRIOR_WEIGHT = 20.0
CELL_WEIGHT = 20.0
# A new sample's recent acceptance, and what a draft weighs in it: the last four or so count.
FIRST_RECENT = 500
RECENT_SHARE = 4


class Judged(Protocol):
    """The drafts of a step (planner.py, `Drafts`)."""

    @property
    def lengths(self) -> Ints: ...
    @property
    def confidences(self) -> Floats: ...
    @property
    def sources(self) -> Ints: ...
    @property
    def matches(self) -> Ints: ...
    @property
    def recents(self) -> Ints: ...


class Acceptance:
    """Counts of draft tokens by cell, and the acceptance probability of each cell. One caller at a time."""

    def __init__(self, *shape: int) -> None:
        self._offered: Doubles = np.zeros(shape)
        self._accepted: Doubles = np.zeros(shape)
        self.table: Floats = np.empty(shape, dtype=np.float32)
        """float32[shape]: acceptance probability by cell, as of the last `refit`."""
        self.refit()

    def forget(self) -> None:
        """Halve what was seen: the policy was updated."""
        self._offered /= 2
        self._accepted /= 2

    def refit(self) -> None:
        """Make `table` anew from what was seen."""
        raise NotImplementedError


class AcceptanceModel(Acceptance):
    """Cells [sources, MATCHES, RECENTS, CONFIDENCES], of drafts from history."""

    def __init__(self, sources: int) -> None:
        """`sources`: drafts come from 0 to `sources` - 1."""
        super().__init__(sources, MATCHES, RECENTS, CONFIDENCES)

    def estimate(self, drafts: Judged) -> tuple[Int32s, Floats]:
        """Return each token's cell (a place in the flat table) and acceptance probability.

        The probability is given that the tokens before it are accepted.
        """
        cells, probabilities = core.estimate(
            drafts.sources, drafts.matches, drafts.recents, drafts.lengths, drafts.confidences, MATCH_EDGES,
            RECENT_EDGES, CONFIDENCE_EDGES, self.table,
        )  # fmt: skip
        return cells, probabilities

    def learn(self, cells: Int32s, lengths: Ints, numbers: Ints, verified: Ints, accepted: Ints) -> int:
        """Count verified drafts: their `numbers`, -1 for one that teaches nothing; tokens verified and accepted.

        `lengths`: of the drafts whose tokens have these `cells`. What was verified past a draft's end (dummies) teaches
        nothing. Returns how many tokens were verified before it.
        """
        learnt: int = core.learn(self._offered, self._accepted, cells, lengths, numbers, verified, accepted)
        return learnt

    def refit(self) -> None:
        """Make `table` anew from what was seen."""
        offered, accepted = self._offered.sum(axis=(1, 2)), self._accepted.sum(axis=(1, 2))
        overall = (accepted + PRIOR_WEIGHT * np.asarray(PRIOR)) / (offered + PRIOR_WEIGHT)
        cells = (self._accepted + CELL_WEIGHT * overall[:, None, None, :]) / (self._offered + CELL_WEIGHT)
        weights = self._offered + CELL_WEIGHT
        rows = (-1, CONFIDENCES)
        core.make_isotonic(cells.reshape(rows), weights.reshape(rows), self.table.reshape(rows))


def classes_of_recent(recents: Ints) -> Ints:
    """Return the class, 0 to RECENTS - 1, of each sample's recent acceptance (thousandths)."""
    return np.searchsorted(RECENT_EDGES, recents, side="right")


class PositionAcceptance(Acceptance):
    """Cells [RECENTS, places], of drafts of bare tokens."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: the most a draft has."""
        super().__init__(RECENTS, tokens)

    def likelihoods(self, recents: Ints) -> Floats:
        """Return acceptance probabilities as float32[drafts, tokens], by the samples' recent acceptance (thousandths).

        Each is the probability that the token at that place is accepted if the tokens before it are.
        """
        found: Floats = self.table[classes_of_recent(recents)]
        return found

    def learn(self, recents: Ints, verified: Ints, accepted: Ints) -> None:
        """Count verified drafts: samples' recent acceptance before (thousandths), tokens verified and accepted."""
        classes, places = classes_of_recent(recents), np.arange(self.table.shape[1])
        np.add.at(self._offered, classes, places < np.minimum(verified, accepted + 1)[:, None])
        np.add.at(self._accepted, classes, places < np.minimum(verified, accepted)[:, None])

    def refit(self) -> None:
        """Make `table` anew from what was seen."""
        offered, accepted = self._offered.sum(axis=0), self._accepted.sum(axis=0)
        overall, before = np.empty_like(offered), POSITION_PRIOR
        for place in range(offered.size):
            before = (accepted[place] + PRIOR_WEIGHT * before) / (offered[place] + PRIOR_WEIGHT)
            overall[place] = before
        self.table[:] = (self._accepted + CELL_WEIGHT * overall) / (self._offered + CELL_WEIGHT)
