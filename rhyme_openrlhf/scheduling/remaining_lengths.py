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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Enough to tell early from late; each costs one walk through the rest of the stage.
SCENARIOS = 8
# Coprime to SCENARIOS: over SCENARIOS samples each quantile occurs once, in an order unlike the samples'.
_SHIFT = 3
# More than any length: stands where a prompt has fewer earlier lengths than another.
_NEVER = np.iinfo(np.int64).max


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
    places = np.arange(len(samples))[:, None]
    quantiles = ((np.arange(scenarios) + places * _SHIFT) % scenarios + 0.5) / scenarios
    generated = np.array([sample.generated for sample in samples])[:, None]
    # Samples of one prompt have the same earlier lengths.
    histories = [sample.earlier for sample in samples]
    rows = {earlier: place for place, earlier in enumerate(dict.fromkeys(histories))}
    counts = np.array([[len(earlier)] for earlier in rows])
    known = np.full((len(rows), int(counts.max()) + 1), _NEVER, dtype=np.int64)
    lengths = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)
    known[np.arange(known.shape[1]) < counts] = np.minimum(lengths, longest_allowed)
    known.sort(axis=1)
    row = [rows[earlier] for earlier in histories]
    ordered = known[row]
    first = (ordered <= generated).sum(axis=1, keepdims=True)
    longer = counts[row] - first
    # Without a longer one this is what stands behind the last, and is replaced.
    found = ordered[places, first + (quantiles * longer).astype(np.int64)] - generated
    beyond = (longer == 0)[:, 0]
    if beyond.any():
        found[beyond] = _pareto(generated[beyond], quantiles[beyond], longest_allowed)
    found[generated[:, 0] >= longest_allowed] = 1
    return np.maximum(found.T, 1)


def _pareto(generated: NDArray[np.int64], quantiles: NDArray[np.float64], allowed: int) -> NDArray[np.float64]:
    """Quantiles of P(L > l) = begin / l, cut off at `allowed`, less what there is."""
    begin = np.maximum(generated, 1)
    rest: NDArray[np.float64] = begin / (1 - quantiles * (1 - begin / allowed)) - generated
    return rest
