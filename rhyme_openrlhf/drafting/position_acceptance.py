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

from rhyme_openrlhf.drafting.acceptance import (
    CELL_WEIGHT,
    PRIOR_WEIGHT,
    RECENTS,
    Doubles,
    Floats,
    Ints,
    classes_of_recent,
)

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

    def likelihoods(self, recents: Ints) -> Floats:
        """Of each draft, by its sample's recent acceptance (thousandths), the probability that the token at each place
        is accepted if those before it are: float32[drafts, tokens]."""
        found: Floats = self.table[classes_of_recent(recents)]
        return found

    def learn(self, recents: Ints, verified: Ints, accepted: Ints) -> None:
        """Of each draft: its sample's recent acceptance before it (thousandths), tokens verified and accepted."""
        classes, places = classes_of_recent(recents), np.arange(self.table.shape[1])
        np.add.at(self._offered, classes, places < np.minimum(verified, accepted + 1)[:, None])
        np.add.at(self._accepted, classes, places < np.minimum(verified, accepted)[:, None])

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
