"""How many draft tokens this step verifies, and of which samples (RLHFSpec 5.3, for a batch of chains).

All running samples' drafts compete: tokens are taken in the order of the probability that they are accepted, each after
those before it in its draft, up to the number D at which

    (B + expected accepted draft tokens) / step seconds(B, context, D)

is greatest (RLHFSpec eq. 2; B: the running samples, each of which yields one sure token). The paper stops at the first
decline; measured step times are staircases, where the next stair may be worth more than the edge of this one, so every
cut is looked at: the walk is one addition and one division a cut.

Invariants: a token is only taken with all before it; D = 0 (no speculation) is always among the cuts; of two samples'
tokens the likelier goes first, up to a relative difference of 2**-BITS, below which their order is that of the samples;
no more than the table of step seconds covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

# Probabilities are compared by the exponent and this many bits of their float32: 0.4 %, less than anyone knows them.
BITS = 8
# Below this a draft token is not worth a look: the cheapest step on record gives a token in more than 1/1000 of itself.
SMALLEST = 2.0**-10
_SHIFT = 23 - BITS
_LOWEST = int(np.float32(SMALLEST).view(np.int32)) >> _SHIFT
_BINS = (int(np.float32(1.0).view(np.int32)) >> _SHIFT) - _LOWEST + 1


@dataclass(frozen=True)
class Budget:
    """`lengths`: draft tokens of each sample, int32[samples]; `drafts` their sum; and what was expected of it."""

    lengths: np.ndarray
    drafts: int
    expected_accepted: float
    seconds: float


def choose(acceptance: np.ndarray, lengths: np.ndarray, seconds: np.ndarray, running: int) -> Budget:
    """The draft lengths that yield most tokens a second.

    `acceptance`: float32[tokens], one draft after the other, the probability that a token is accepted if those before
    it are; `lengths`: int[samples], tokens proposed for each; `seconds`: float64[n + 1], step seconds with 0 to n draft
    tokens; `running`: samples in the step, with a draft or without.
    """
    taken, drafts, expected = choose_lengths(acceptance, lengths, seconds, running)
    return Budget(taken, int(drafts), float(expected), float(seconds[drafts]))


@numba.njit(cache=True)
def choose_lengths(acceptance, lengths, seconds, running):  # type: ignore[no-untyped-def]
    """`choose` for compiled callers: the lengths, their sum, and how many are expected to be accepted."""
    samples = lengths.size
    # The probability that a token and all before it are accepted; 0 where that is not worth a look.
    paths = np.zeros(acceptance.size, dtype=np.float32)
    begin = 0
    for sample in range(samples):
        path = np.float32(1.0)
        for at in range(begin, begin + lengths[sample]):
            path *= acceptance[at]
            if path < SMALLEST:
                break
            paths[at] = path
        begin += lengths[sample]
    bins = paths.view(np.int32)
    count = np.zeros(_BINS, dtype=np.int64)
    total = np.zeros(_BINS, dtype=np.float64)
    for token in range(paths.size):
        if paths[token] > 0:
            at = min((bins[token] >> _SHIFT) - _LOWEST, _BINS - 1)
            count[at] += 1
            total[at] += paths[token]

    most = len(seconds) - 1
    best = running / seconds[0]
    best_drafts, best_expected = 0, 0.0
    drafts, expected = 0, 0.0
    for at in range(_BINS - 1, -1, -1):
        if not count[at]:
            continue
        mean = total[at] / count[at]
        for _ in range(min(count[at], most - drafts)):
            drafts += 1
            expected += mean
            value = (running + expected) / seconds[drafts]
            if value > best:
                best, best_drafts, best_expected = value, drafts, expected
        if drafts == most:
            break

    taken = np.zeros(samples, dtype=np.int32)
    # Bins above the one in which the cut lies are taken whole, of that one what is left, by sample and place.
    left, cut = best_drafts, -1
    for at in range(_BINS - 1, -1, -1):
        if count[at] > left:
            cut = at
            break
        left -= count[at]
    begin = 0
    for sample in range(samples):
        for token in range(begin, begin + lengths[sample]):
            if paths[token] == 0:
                break
            at = min((bins[token] >> _SHIFT) - _LOWEST, _BINS - 1)
            if at > cut:
                taken[sample] += 1
            elif at == cut and left > 0:
                taken[sample] += 1
                left -= 1
            else:
                break
        begin += lengths[sample]
    return taken, best_drafts, best_expected
