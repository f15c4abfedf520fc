"""The compiled half of a draft index: the best continuation of a match (RhymeRL, sections 5.2, 5.3).

Works as `history/lookup.py` does, from the node that it found, and takes the best child at each branch
(`history/index.py` says which that is). A small node is looked at once: the numbers of tokens that neighbours share
say where its children end and up to where each of them has no branch.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int32_of, int64_of, uint8_of, uint16_of
from rhyme_openrlhf.history.lookup import (
    GRADES,
    LOOKED_AT,
    MOST_SHARED,
    REWARDS,
    SHARED,
    SUFFIXES,
    SUM_EVERY,
    SUMS,
    TOKENS,
    child_end,
    first_at_least,
    longest_match,
    token_at,
)

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

# As CALLED_SOURCES of lookup.py, of lookup.py and what it calls.
CALLED_SOURCES = 690489077

# A step's confidence is (count + A) / (node's count + B) for the child that is followed: A < B, so that a node with one
# child is not certain, and one that was seen often is more certain than one seen once. From a recorded run of the
# embedded task: a node seen once went on as before 19 times of 20, one seen four times or more 99 times of 100.
CONFIDENCE_A = 0.5
CONFIDENCE_B = 0.55
# With fewer tokens before it a node goes on as before less often (there: 75 to 95 of 100 with 4 to 11); with more than
# this, their number says nothing any more.
SURE_MATCH = 12
SHORT_MATCH_FACTOR = 0.92


@njit(cache=True, nogil=True)
def draft_from(
    index: Int64s, text: Int32s, longest: int, shortest: int, out: Int32s, confidence: Float32s
) -> tuple[int, int]:
    """Fill `out` with what follows the longest end of `text` that occurs; returns (tokens found, tokens matched).

    Matches from `longest` down to `shortest` tokens; both results are 0 without one. `confidence` as `walk` fills it.
    """
    low, high, length = longest_match(index, text, longest, shortest)
    if not length:
        return 0, 0
    at = int32_of(index[SUFFIXES], low)
    found, _ = walk(index, low, high, length, low, at, out.size, 0.0, 0.0, out, confidence)
    return found, length


@njit(cache=True, nogil=True)
def walk(
    index: Int64s,
    low: int,
    high: int,
    depth: int,
    near: int,
    at: int,
    window: int,
    stop_confidence: float,
    extend_confidence: float,
    out: Int32s,
    confidence: Float32s,
) -> tuple[int, int]:
    """Follow the best child from the node [low, high) at `depth`; returns tokens filled in and a position.

    The suffix that begins there begins with all that matched and was drafted. What all suffixes of a node have in
    common is read from the one at place `near`, which begins at `at`, as long as it is one of them: its tokens are in
    the caches. `confidence[i]` becomes the estimated probability that the draft is right up to and including token i;
    behind the first token the draft ends where that is below `stop_confidence`, and behind `window` tokens where it is
    below `extend_confidence`.
    """
    tokens, suffixes = index[TOKENS], index[SUFFIXES]
    found = 0
    sure = 1.0
    # Up to where the node's suffixes are the same, as far as that is known.
    known = _least_shared(index, low, high)
    while found < out.size:
        count = high - low
        common = depth + out.size - found
        if count > 1:
            common = known if depth <= known < MOST_SHARED else _common(index, low, high, depth, common)
            if common == depth:
                low, high, known = _best_child(index, low, high, depth)
                if low == high:
                    break
                common = depth + 1
        factor = ((high - low) + CONFIDENCE_A) / (count + CONFIDENCE_B)
        if not low <= near < high:
            near = low
            at = int32_of(suffixes, near)
        while depth < common and found < out.size:
            token = int32_of(tokens, at + depth)
            if token < 0:
                return found, at
            sure *= factor
            if depth < SURE_MATCH:
                sure *= SHORT_MATCH_FACTOR
            kept = np.float32(sure)
            if found and kept < (stop_confidence if found < window else extend_confidence):
                return found, at
            out[found] = token
            confidence[found] = kept
            found += 1
            depth += 1
    return found, at


@njit(cache=True, nogil=True)
def _least_shared(index: Int64s, low: int, high: int) -> int:
    """How many first tokens all suffixes of the small node [low, high) share: MOST_SHARED or more; -1: it is large."""
    if high - low > LOOKED_AT:
        return -1
    least = MOST_SHARED
    for place in range(low + 1, high):
        least = min(least, uint8_of(index[SHARED], place))
    return least


@njit(cache=True, nogil=True)
def _common(index: Int64s, low: int, high: int, depth: int, most: int) -> int:
    """How many first tokens (at least `depth`, at most `most`) all suffixes of the node [low, high) have in common."""
    first, last = int32_of(index[SUFFIXES], low), int32_of(index[SUFFIXES], high - 1)
    common = depth
    while common < most and int32_of(index[TOKENS], first + common) == int32_of(index[TOKENS], last + common):
        common += 1
    return common


@njit(cache=True, nogil=True)
def _best_child(index: Int64s, low: int, high: int, depth: int) -> tuple[int, int, int]:
    """The child with the greatest (max(priority, 0), count, recency), see `history/index.py`; empty: all end here.

    Third: `_least_shared` of it.
    """
    if high - low <= LOOKED_AT and depth < MOST_SHARED:
        start, end, shared = _best_of_small(index, low, high, depth)
        # What ends here is a child of its own, of one suffix, and takes no part.
        if end - start > 1 or token_at(index, start, depth) >= 0:
            return start, end, shared
    start = first_at_least(index, low, high, depth, 0)
    best_start, best_end, best_priority = start, start, -1
    while start < high:
        end = child_end(index, start, high, depth)
        priority = max(_priority(index, start, end), 0)
        if _is_better(index, start, end, priority, best_start, best_end, best_priority):
            best_start, best_end, best_priority = start, end, priority
        start = end
    return best_start, best_end, _least_shared(index, best_start, best_end)


@njit(cache=True, nogil=True)
def _best_of_small(index: Int64s, low: int, high: int, depth: int) -> tuple[int, int, int]:
    """As `_best_child` for a small node with branches at `depth`, but what ends here takes part."""
    shared, grades, rewards = index[SHARED], index[GRADES], index[REWARDS]
    best_start, best_end, best_priority, best_shared = low, low, -1, MOST_SHARED
    start, total, least = low, int64_of(rewards, uint16_of(grades, low)), MOST_SHARED
    for place in range(low + 1, high + 1):
        both = uint8_of(shared, place) if place < high else depth
        if both > depth:
            least = min(least, both)
        else:
            priority = max(total, 0)
            if _is_better(index, start, place, priority, best_start, best_end, best_priority):
                best_start, best_end, best_priority, best_shared = start, place, priority, least
            start, total, least = place, 0, MOST_SHARED
        if place < high:
            total += int64_of(rewards, uint16_of(grades, place))
    return best_start, best_end, best_shared


@njit(cache=True, nogil=True)
def _is_better(
    index: Int64s, start: int, end: int, priority: int, best_start: int, best_end: int, best_priority: int
) -> bool:
    """Whether the child [start, end) goes before the best one so far."""
    if priority != best_priority:
        return priority > best_priority
    gain = (end - start) - (best_end - best_start)
    if gain:
        return gain > 0
    # Rare enough that scanning the two intervals is cheaper than keeping range maxima for all of them.
    return _latest(index, start, end) > _latest(index, best_start, best_end)


@njit(cache=True, nogil=True)
def _latest(index: Int64s, low: int, high: int) -> int:
    """The furthest position of the suffixes [low, high)."""
    latest = 0
    for place in range(low, high):
        latest = max(latest, int32_of(index[SUFFIXES], place))
    return latest


@njit(cache=True, nogil=True)
def _priority(index: Int64s, low: int, high: int) -> int:
    """The sum of the rewards of the suffixes [low, high)."""
    total = 0
    if high - low > SUM_EVERY:
        first, last = -(-low // SUM_EVERY), high // SUM_EVERY
        total += int64_of(index[SUMS], last) - int64_of(index[SUMS], first)
        for place in range(low, first * SUM_EVERY):
            total += int64_of(index[REWARDS], uint16_of(index[GRADES], place))
        low = last * SUM_EVERY
    for place in range(low, high):
        total += int64_of(index[REWARDS], uint16_of(index[GRADES], place))
    return total
