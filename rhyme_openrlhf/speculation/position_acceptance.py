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

from rhyme_openrlhf.speculation.acceptance import (
    CELL_WEIGHT,
    PRIOR_WEIGHT,
    RECENT_EDGES,
    RECENTS,
    Doubles,
    Floats,
    Ints,
)

# Of a first token, before anything was seen: between an n-gram's and a good draft model's.
PRIOR = 0.6


def places(lengths: Ints) -> Ints:
    """0, 1, ... of each draft, one draft after the other."""
    ends = np.cumsum(lengths)
    found: Ints = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - lengths, lengths)
    return found


class PositionAcceptance:
    """Of one engine's drafter. One caller at a time."""

    def __init__(self, tokens: int) -> None:
        """`tokens`: the most a draft has."""
        self._offered: Doubles = np.zeros((RECENTS, tokens))
        self._accepted: Doubles = np.zeros((RECENTS, tokens))
        self.table: Floats = np.empty((RECENTS, tokens), dtype=np.float32)
        """float32[RECENTS, tokens]: acceptance probability, as of the last `refit`."""
        self.refit()

    def likelihood(self, recents: Ints, lengths: Ints) -> Floats:
        """Of each token, one draft after the other, the probability that it is accepted if those before it are.

        For each draft its sample's recent acceptance (thousandths) and its length.
        """
        found: Floats = self.table[np.repeat(_rows(recents), lengths), places(lengths)]
        return found

    def learn(self, recents: Ints, verified: Ints, accepted: Ints) -> None:
        """Of each draft: its sample's recent acceptance before it, tokens verified and tokens accepted."""
        told = np.minimum(verified, accepted + 1)
        at, rows = places(told), np.repeat(_rows(recents), told)
        np.add.at(self._offered, (rows, at), 1)
        np.add.at(self._accepted, (rows, at), at < np.repeat(accepted, told))

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


def _rows(recents: Ints) -> Ints:
    found: Ints = np.searchsorted(RECENT_EDGES, recents, side="right")
    return found
