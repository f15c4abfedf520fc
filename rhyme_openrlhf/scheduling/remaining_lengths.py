"""How much longer unfinished samples will be, from what their prompts were answered before.

A prompt's earlier response lengths, those longer than what the sample has by now, are the sample of its future. Where
none is longer, the sample goes beyond all history, and its length is taken from a Pareto law that begins where it is:
half of such samples end before they have doubled, bounded by the longest allowed.

Future lengths are `scenarios`: each takes another quantile of every sample, shifted from sample to sample, so that in
each scenario some samples are long and some short. No random numbers: the same state gives the same answer.

Invariants: at least one token remains for each, and no response is longer than allowed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Enough to tell early from late; each costs one walk through the rest of the stage.
SCENARIOS = 8
# Coprime to SCENARIOS: over SCENARIOS samples each quantile occurs once, in an order unlike the samples'.
_SHIFT = 3


class Unfinished(NamedTuple):
    """A running sample: tokens generated, tokens of context (prompt included), and its prompt's `earlier` lengths."""

    generated: int
    context: int
    earlier: tuple[int, ...] = ()


def by_maximum(samples: Sequence[Unfinished], longest_allowed: int) -> NDArray[np.int64]:
    """PAT's bound: everything runs to the longest response allowed. int64[1, samples], tokens still to come."""
    return np.array([[max(longest_allowed - sample.generated, 1) for sample in samples]], dtype=np.int64)


def by_history(samples: Sequence[Unfinished], longest_allowed: int, scenarios: int = SCENARIOS) -> NDArray[np.int64]:
    """Scenarios of tokens still to come, int64[scenarios, samples]."""
    # The sample's own place among the quantiles moves from sample to sample.
    quantiles = ((np.arange(scenarios) + np.arange(scenarios)[:, None] * _SHIFT) % scenarios + 0.5) / scenarios
    rows = quantiles.tolist()
    # Samples of one prompt have the same earlier lengths.
    ordered: dict[tuple[int, ...], list[int]] = {}
    found = np.ones((len(samples), scenarios), dtype=np.int64)
    beyond = []
    for place, sample in enumerate(samples):
        if sample.generated >= longest_allowed:
            continue
        if sample.earlier not in ordered:
            ordered[sample.earlier] = sorted(min(length, longest_allowed) for length in sample.earlier)
        earlier = ordered[sample.earlier]
        first = bisect_right(earlier, sample.generated)
        longer = len(earlier) - first
        if longer:
            then = [earlier[first + int(quantile * longer)] for quantile in rows[place % scenarios]]
            found[place] = [length - sample.generated for length in then]
        else:
            beyond.append(place)
    if beyond:
        generated = np.array([[samples[place].generated] for place in beyond])
        found[beyond] = _pareto(generated, quantiles[np.array(beyond) % scenarios], longest_allowed)
    return np.maximum(found.T, 1)


def _pareto(generated: NDArray[np.int64], quantiles: NDArray[np.float64], allowed: int) -> NDArray[np.float64]:
    """Quantiles of P(L > l) = begin / l, cut off at `allowed`, less what there is."""
    begin = np.maximum(generated, 1)
    rest: NDArray[np.float64] = begin / (1 - quantiles * (1 - begin / allowed)) - generated
    return rest
