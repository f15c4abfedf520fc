"""The number of draft tokens that a decode step verifies for each sample: by step times, or by RhymeRL's window.

**With step times** (RLHFSpec 5.3, for a batch of chains) the compiled core chooses (csrc/budget.h). It takes tokens of
all samples in the order of the probability that they are accepted, up to the number that yields most tokens a second.
That number is 0 for a batch that is too large for drafts (RhymeRL, section 5.4). Then, now and then, the beginning of a
draft is verified all the same, because what is never tried is never learnt (`Tries`).

**Without step times** a sample's window chooses (RhymeRL, section 5.4), a congestion window as in TCP. The window grows
by a fixed step when a draft was accepted whole, and any rejection sets it back to its start.

Invariants:
- A token is only taken with all tokens before it. A step takes no more tokens than the table of step seconds covers.
- A beginning is tried only where nothing else is verified: in every (TRIED_AFTER + 1)th of such steps that have a
  proposal, or in the next one that has room. It has no more tokens than the step has room for.
- A window's size is from `window_start` to `window_max`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

# Steps in which nothing of what is proposed is verified, before a beginning is; and running samples to a token of it.
# A token a 32 samples costs such a step some percent, and so all of them together some tenths.
TRIED_AFTER, RUNNING_TO_A_TOKEN = 16, 32


class Tries:
    """The steps in which an engine tries a beginning. One caller at a time."""

    def __init__(self) -> None:
        # Steps with a proposal, since one was verified last, in which nothing was.
        self._untried = 0
        self.trying = False
        """Whether the last step was to try, if nothing in it was worth it."""

    def tokens(self, running: int, most: int) -> int:
        """Return the tokens to verify in the next step if none is worth it: 0 in most steps, at most `most`."""
        tried = min(max(running // RUNNING_TO_A_TOKEN, 1), most) if self._untried >= TRIED_AFTER else 0
        self.trying = tried > 0
        return tried

    def decided(self, proposed: int, verified: int) -> None:
        """Note how many of the `proposed` tokens the step verifies."""
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


def share(lengths: Sequence[int] | NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return draft lengths whose sum is at most `most`: the longest drafts are cut, all to the same length.

    What does not divide evenly goes to the longest of them, a token each.
    """
    kept, most = np.array(lengths, np.int64), max(most, 0)
    if kept.sum() <= most:
        return kept
    # Shortest first: what a short draft leaves of its share goes to the longer ones.
    order = np.argsort(kept[::-1], kind="stable")
    ascending = kept[::-1][order]
    left = most - (np.cumsum(ascending) - ascending)
    first = int(np.argmax(ascending > left // np.arange(kept.size, 0, -1)))
    each, over = divmod(int(left[first]), kept.size - first)
    ascending[first:] = each
    ascending[kept.size - over :] += 1
    kept[kept.size - 1 - order] = ascending
    return kept


def next_window(size: int, verified: int, accepted: int, start: int, step: int, most: int) -> int:
    """Return the window after a draft with one or more `verified` tokens, some or all of them `accepted`.

    `start`, `step`, `most`: `window_start`, `window_step` and `window_max` of the settings.
    """
    return min(size + step, most) if accepted == verified else start


class SpeculationWindow:
    """The window of one sample. Its whole state is `size`, so a sample that moves takes a plain int with it."""

    def __init__(self, settings: HistoSpecSettings, size: int | None = None) -> None:
        """Starts at `settings.window_start`, or at `size` if the sample had a window before.

        Raises ValueError for a `size` that no window of these settings can have.
        """
        self._settings = settings
        self._size = settings.window_start if size is None else size
        if not settings.window_start <= self._size <= settings.window_max:
            raise ValueError(
                f"a window is from {settings.window_start} to {settings.window_max} tokens, got {self._size}"
            )

    @property
    def size(self) -> int:
        """Most draft tokens of the next decode step."""
        return self._size

    def record(self, drafted: int, accepted: int) -> None:
        """Learn what became of one draft, in tokens. Raises ValueError unless 0 <= accepted <= drafted."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"need 0 <= accepted <= drafted, got {accepted} accepted of {drafted} drafted")
        if drafted:
            rules = self._settings
            self._size = next_window(
                self._size, drafted, accepted, rules.window_start, rules.window_step, rules.window_max
            )
