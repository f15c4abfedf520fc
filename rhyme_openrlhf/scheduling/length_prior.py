"""Lengths to expect of prompts never answered: those of the run's latest responses to the same data set.

In the first epoch no prompt has a history, and RhymeRL places all of them by load. But prompts of one data set are
answered alike. So the streaming pipeline ranks an unseen prompt by its data set's mean length. With deferral, what is
too long for it comes from the data set's survival curve: the length that one in twenty of its responses exceeds.
Without deferral nothing is too long, because moving such samples within their step makes runs slower
(docs/differences.md).

Invariants:
- A prompt's own history always goes before its data set's.
- Nothing is expected before two data sets are known, because one alone ranks no prompt before another.
- Lengths of a step count once all of it has ended, because short responses end first.
- The same responses in the same order give the same expectation. Each data set keeps its latest `KEPT` lengths.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Responses of a data set that count: enough for its tail. Older ones are forgotten, since lengths change in training.
KEPT = 2048
# Prompts from which on a data set is known.
ENOUGH = 4
# The mean would make outliers of samples that are as long as usual.
LIMIT_QUANTILE = 0.95


class Expected(NamedTuple):
    """Expected lengths of a step's prompts, None where nothing is known, and the lengths that few of them exceed."""

    lengths: list[float | None]
    limits: list[float | None]


class LengthPrior:
    """The expectation of one run. `defers`: whether a prompt group with a far too long response is deferred."""

    def __init__(self, defers: bool = False) -> None:
        self._defers = defers
        self._kept: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._prompts: defaultdict[str, int] = defaultdict(int)
        # By step: the data sets and lengths of its prompts that have ended.
        self._ended: dict[int, list[tuple[str, Sequence[int]]]] = {}
        self._means: dict[str, tuple[float, float]] | None = None

    def ended(self, step: int, prompts: int, data_set: str, lengths: Sequence[int]) -> None:
        """Note the lengths of the responses to one of the `prompts` prompts of a step."""
        of_step = self._ended.setdefault(step, [])
        of_step.append((data_set, lengths))
        if len(of_step) < prompts:
            return
        # Of an earlier step, what is missing was given up.
        for whole in sorted(number for number in self._ended if number <= step):
            for name, found in self._ended.pop(whole):
                self._kept[name].extend(found)
                self._prompts[name] += 1
        self._means = None

    def expected(self, own: Sequence[float | None], data_sets: Sequence[str]) -> Expected:
        """Return what to expect of each prompt; `own`: its historical length, None if it was never answered."""
        known = self._known()
        if len(known) < 2:
            return Expected(list(own), list(own))
        nothing = None, None
        pairs = [
            (length, length) if length is not None else known.get(name, nothing)
            for length, name in zip(own, data_sets, strict=True)
        ]
        return Expected([mean for mean, _ in pairs], [limit for _, limit in pairs])

    def _known(self) -> dict[str, tuple[float, float]]:
        """Return the mean length and the limit of each data set that is known."""
        if self._means is None:
            self._means = {
                name: (statistics.fmean(lengths), self._limit(lengths))
                for name, lengths in self._kept.items()
                if self._prompts[name] >= ENOUGH
            }
        return self._means

    def _limit(self, lengths: Sequence[int]) -> float:
        return float(np.quantile(lengths, LIMIT_QUANTILE)) if self._defers else math.inf
