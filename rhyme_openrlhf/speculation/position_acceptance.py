"""How likely a draft token is to be accepted, of drafters that say nothing of their confidence: by its place.

What vLLM's own methods propose (a draft model, EAGLE, n-grams) comes as bare tokens. What is known of each is how far
in the draft it stands, and how the sample's last drafts fared: each pair of the two counts how often its tokens were
accepted, given that those before them were.

Invariants: a pair that has seen little answers as its place does in all, and a place that has seen little as the one
before it; `forget` halves what was seen, because a policy update changes what is accepted; tokens behind a rejected one
teach nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rhyme_openrlhf.speculation.acceptance import (
    CELL_WEIGHT,
    PRIOR_WEIGHT,
    RECENTS,
    Doubles,
    Floats,
    Ints,
    class_of_recent,
)

# CRC-32 of the module whose compiled functions are called here, as CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 2295991662

# Of a first token, before anything was seen: between an n-gram's and a good draft model's.
PRIOR = 0.6


class PositionAcceptance:
    """Of one engine's drafter. One caller at a time."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: the most a draft has."""
        self._offered: Doubles = np.zeros((RECENTS, tokens))
        self._accepted: Doubles = np.zeros((RECENTS, tokens))
        self.table: Floats = np.empty((RECENTS, tokens), dtype=np.float32)
        """float32[RECENTS, tokens]: acceptance probability, as of the last `refit`."""
        self.refit()

    def learn(self, recents: Ints, verified: Ints, accepted: Ints) -> None:
        """Of each draft: its sample's recent acceptance before it (thousandths), tokens verified and accepted."""
        _learn(self._offered, self._accepted, recents, verified, accepted)

    def forget(self) -> None:
        """Halve what was seen: the policy was updated."""
        self._offered /= 2
        self._accepted /= 2

    def refit(self) -> None:
        """Make `table` anew from what was seen."""
        offered, accepted = self._offered.sum(axis=0), self._accepted.sum(axis=0)
        overall, before = np.empty_like(offered), PRIOR
        for place in range(offered.size):
            before = (accepted[place] + PRIOR_WEIGHT * before) / (offered[place] + PRIOR_WEIGHT)
            overall[place] = before
        self.table[:] = (self._accepted + CELL_WEIGHT * overall) / (self._offered + CELL_WEIGHT)


@njit(cache=True)
def likelihoods(table, recents, lengths):  # type: ignore[no-untyped-def]
    """Of each token, one draft after the other, the probability that it is accepted if those before it are.

    `table`: a `PositionAcceptance.table`; of each draft its sample's recent acceptance (thousandths) and its length.
    """
    found = np.empty(lengths.sum(), dtype=np.float32)
    at = 0
    for draft in range(lengths.size):
        row = class_of_recent(recents[draft])
        for place in range(lengths[draft]):
            found[at] = table[row, place]
            at += 1
    return found


@njit(cache=True)
def _learn(offered, accepted_of, recents, verified, accepted):  # type: ignore[no-untyped-def]
    for draft in range(recents.size):
        row = class_of_recent(recents[draft])
        for place in range(min(verified[draft], accepted[draft] + 1)):
            offered[row, place] += 1
            accepted_of[row, place] += place < accepted[draft]
