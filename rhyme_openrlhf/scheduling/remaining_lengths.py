"""How much longer unfinished samples will be, from what their prompts were answered before.

A prompt's earlier response lengths, those longer than what the sample has by now, are the sample of its future. Where
none is longer, the sample goes beyond all history, and its length is taken from a Pareto law that begins where it is:
half of such samples end before they have doubled, bounded by the longest allowed.

Future lengths are `scenarios`: each takes another quantile of every sample, shifted from sample to sample, so that in
each scenario some samples are long and some short. No random numbers: the same state gives the same answer.

Invariants: at least one token remains for each, and no response is longer than allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.drafting_core import stages

# Enough to tell early from late; each costs one walk through the rest of the stage.
SCENARIOS = 8
# Coprime to SCENARIOS: over SCENARIOS samples each quantile occurs once, in an order unlike the samples'.
_SHIFT = 3


class Unfinished(NamedTuple):
    """A running sample: tokens generated, tokens of context (prompt included), and its prompt's `earlier` lengths."""

    generated: int
    context: int
    earlier: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnfinishedSamples:
    """Many of them by columns: hundreds are asked about at a time. `history`: of each sample, which of `histories`."""

    generated: NDArray[np.int64]
    contexts: NDArray[np.int64]
    history: NDArray[np.int64]
    histories: Sequence[NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.generated)

    @staticmethod
    def of(samples: Sequence[Unfinished]) -> UnfinishedSamples:
        """These, in this order."""
        rows: dict[tuple[int, ...], int] = {}
        history = [rows.setdefault(sample.earlier, len(rows)) for sample in samples]
        return UnfinishedSamples(
            np.array([sample.generated for sample in samples], dtype=np.int64),
            np.array([sample.context for sample in samples], dtype=np.int64),
            np.array(history, dtype=np.int64),
            [np.array(earlier, dtype=np.int64) for earlier in rows],
        )


def by_maximum(samples: UnfinishedSamples, longest_allowed: int) -> NDArray[np.int64]:
    """PAT's bound: everything runs to the longest response allowed. int64[1, samples], tokens still to come."""
    return np.maximum(longest_allowed - samples.generated, 1)[None]


def by_history(samples: UnfinishedSamples, longest_allowed: int, scenarios: int = SCENARIOS) -> NDArray[np.int64]:
    """Scenarios of tokens still to come, int64[scenarios, samples]."""
    histories = samples.histories
    begins = np.array([0, *itertools.accumulate(map(len, histories))], dtype=np.int64)
    found: NDArray[np.int64] = stages.scenarios_of(
        samples.generated,
        samples.history,
        np.concatenate(histories),
        begins,
        longest_allowed,
        scenarios,
        _SHIFT,
    )
    return found
