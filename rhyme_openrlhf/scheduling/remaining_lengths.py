"""How much longer unfinished samples will be, from what their prompts were answered before.

A prompt's earlier response lengths, those longer than what the sample has by now, are the sample of its future. Where
none is longer, the sample goes beyond all history, and its length is taken from a Pareto law that begins where it is:
half of such samples end before they have doubled, bounded by the longest allowed.

Future lengths are `scenarios`: each takes another quantile of every sample, shifted from sample to sample, so that in
each scenario some samples are long and some short. No random numbers: the same state gives the same answer.

Invariants: at least one token remains for each, and no response is longer than allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Enough to tell early from late; each costs one walk through the rest of the stage.
SCENARIOS = 8
# Coprime to SCENARIOS: over SCENARIOS samples each quantile occurs once, in an order unlike the samples'.
_SHIFT = 3


@dataclass(frozen=True)
class Unfinished:
    """A running sample: tokens generated, tokens of context (prompt included), and its prompt's `earlier` lengths."""

    generated: int
    context: int
    earlier: tuple[int, ...] = ()


def by_maximum(samples: Sequence[Unfinished], longest_allowed: int) -> NDArray[np.int64]:
    """PAT's bound: everything runs to the longest response allowed. int64[1, samples], tokens still to come."""
    return np.array([[max(longest_allowed - sample.generated, 1) for sample in samples]], dtype=np.int64)


def by_history(samples: Sequence[Unfinished], longest_allowed: int, scenarios: int = SCENARIOS) -> NDArray[np.int64]:
    """Scenarios of tokens still to come, int64[scenarios, samples]."""
    found = np.empty((scenarios, len(samples)), dtype=np.int64)
    for place, sample in enumerate(samples):
        # The sample's own place among the quantiles moves from sample to sample.
        quantiles = ((np.arange(scenarios) + place * _SHIFT) % scenarios + 0.5) / scenarios
        found[:, place] = _quantiles(sample, quantiles, longest_allowed)
    return np.maximum(found, 1)


def _quantiles(sample: Unfinished, quantiles: NDArray[np.float64], allowed: int) -> NDArray[np.float64]:
    longer = sorted(min(length, allowed) for length in sample.earlier if length > sample.generated)
    if longer:
        places = (quantiles * len(longer)).astype(np.int64)
        return np.array(longer, dtype=np.float64)[places] - sample.generated
    begin = max(sample.generated, 1)
    if begin >= allowed:
        return np.ones_like(quantiles)
    # Quantiles of P(L > l) = begin / l, cut off at `allowed`.
    return begin / (1 - quantiles * (1 - begin / allowed)) - sample.generated
