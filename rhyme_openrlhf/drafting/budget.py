"""How many draft tokens a step verifies, and of which samples (RLHFSpec 5.3, for a batch of chains).

The compiled core chooses (csrc/budget.h): tokens of all samples in the order of the probability that they are accepted,
up to the number that yields most tokens a second. Where that is none, now and then the beginning of a draft is verified
all the same, so that belief can change: what was never tried is never learnt, and an engine for which drafts were not
worth it for a while would verify none for ever, however well they are accepted later.

Invariants: a token is only taken with all before it; no more than the table of step seconds covers. A beginning is
tried only where nothing else is verified, and in every (TRIED_AFTER + 1)th of such steps that have a proposal, or the
next that has room for one; never more than the step has room for, nor more than a draft has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting_core import core

# Steps in which nothing of what is proposed is verified, before a beginning is; and running samples to a token of it.
# A token a 32 samples costs such a step some percent, and so all of them together some tenths.
TRIED_AFTER, RUNNING_TO_A_TOKEN = 16, 32


class Tries:
    """When an engine tries. One caller at a time."""

    def __init__(self) -> None:
        # Steps with a proposal, since one was verified last, in which nothing was.
        self._untried = 0
        self.trying = False
        """Whether the last step was to try, if nothing in it was worth it."""

    def tokens(self, running: int, most: int) -> int:
        """Tokens to verify in the next step if none is worth it: 0 in most steps, and never more than `most`."""
        tried = min(max(running // RUNNING_TO_A_TOKEN, 1), most) if self._untried >= TRIED_AFTER else 0
        self.trying = tried > 0
        return tried

    def decided(self, proposed: int, verified: int) -> None:
        """Of so many `proposed` tokens that step verifies so many."""
        if verified:
            self._untried = 0
        elif proposed:
            self._untried += 1


class Budget(NamedTuple):
    """Draft tokens of each sample, their sum, and how many of them are expected to be accepted."""

    lengths: NDArray[np.int64]
    drafts: int
    expected_accepted: float


def choose(
    acceptance: NDArray[np.float32],
    lengths: NDArray[np.int64],
    seconds: NDArray[np.float64],
    running: int,
    tried: int = 0,
) -> Budget:
    """Return the draft lengths that yield most tokens a second; where those are none, a beginning of `tried` tokens.

    `acceptance`: float32[tokens], one draft after the other, the probability that a token is accepted if those before
    it are; `lengths`: tokens proposed for each sample; `seconds`: float64[n + 1], step seconds with 0 to n draft
    tokens; `running`: samples in the step, with a draft or without.
    """
    return Budget(*core.choose(acceptance, lengths, seconds, running, tried))


def share(lengths: Sequence[int], most: int) -> list[int]:
    """Return draft lengths whose sum is at most `most`: the longest drafts are cut, all to the same length.

    What does not divide evenly goes to the longest of them, a token each.
    """
    left, kept = max(most, 0), list(lengths)
    # Shortest first: what a short draft leaves of its share goes to the longer ones.
    order = sorted(range(len(kept)), key=lambda number: (kept[number], -number))
    for position, number in enumerate(order):
        kept[number] = min(kept[number], left // (len(order) - position))
        left -= kept[number]
    return kept
