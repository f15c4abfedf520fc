"""Beginnings of drafts that are verified although no draft is believed to be worth it, so that belief can change.

What was never tried is never learnt: an engine for which drafts were not worth it for a while would verify none for
ever, however well they are accepted later.

Invariants: only where nothing else is verified, and in every (TRIED_AFTER + 1)th of such steps that have a proposal, or
the next that has room for one; never more than the step has room for, nor more than a draft has.
"""

from __future__ import annotations

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
