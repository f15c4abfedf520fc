"""The compiled half of a draft index: the best continuation of a match (RhymeRL, sections 5.2, 5.3).

Works as `history/lookup.py` does, from the node that it found, and takes the best child at each branch
(`history/index.py` says which that is). A small node is looked at once: the numbers of tokens that neighbours share
say where its children end and up to where each of them has no branch.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import (
    TOGETHER,
    bytes_at_least,
    int32_of,
    int64_of,
    least_byte,
    trailing_zeros,
    uint16_of,
)
from rhyme_openrlhf.history.lookup import (
    GRADES,
    MOST_SHARED,
    REWARDS,
    SHARED,
    SUFFIXES,
    SUM_EVERY,
    SUMS,
    TOKEN_COUNT,
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
CALLED_SOURCES = 3753370144

# A step's confidence is (count + A) / (node's count + B) for the child that is followed: A < B, so that a node with one
# child is not certain, and one that was seen often is more certain than one seen once. From a recorded run of the
# embedded task: a node seen once went on as before 19 times of 20, one seen four times or more 99 times of 100.
CONFIDENCE_A = 0.5
CONFIDENCE_B = 0.55
# With fewer tokens before it a node goes on as before less often (there: 75 to 95 of 100 with 4 to 11); with more than
# this, their number says nothing any more.
SURE_MATCH = 12
SHORT_MATCH_FACTOR = 0.92
# A node's sum of rewards that nobody has made yet: no sum is so small (`history/index.py` keeps bits to spare).
NOT_SUMMED = -(1 << 63)


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
    # Up to where the node's suffixes are the same, as far as that is known; and the sum of their rewards.
    known, total = _least_shared(index, low, high), NOT_SUMMED
    while found < out.size:
        count = high - low
        common = depth + out.size - found
        if count > 1:
            common = known if depth <= known < MOST_SHARED else _common(index, low, high, depth, common)
            if common == depth:
                low, high, known, total = _best_child(index, low, high, depth, total)
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
def _is_small(index: Int64s, low: int, high: int) -> bool:
    """Whether the node's numbers of shared tokens are looked at together."""
    return high - low <= TOGETHER and low + TOGETHER <= index[TOKEN_COUNT]


@njit(cache=True, nogil=True)
def _least_shared(index: Int64s, low: int, high: int) -> int:
    """How many first tokens all suffixes of the small node [low, high) share: MOST_SHARED or more; -1: it is large."""
    if not _is_small(index, low, high):
        return -1
    # All but the lowest bit: what the first suffix shares, it shares with one before the node.
    return least_byte(index[SHARED] + low, (1 << (high - low)) - 2)


@njit(cache=True, nogil=True)
def _common(index: Int64s, low: int, high: int, depth: int, most: int) -> int:
    """How many first tokens (at least `depth`, at most `most`) all suffixes of the node [low, high) have in common."""
    first, last = int32_of(index[SUFFIXES], low), int32_of(index[SUFFIXES], high - 1)
    common = depth
    while common < most and int32_of(index[TOKENS], first + common) == int32_of(index[TOKENS], last + common):
        common += 1
    return common


@njit(cache=True, nogil=True)
def _best_child(index: Int64s, low: int, high: int, depth: int, total: int) -> tuple[int, int, int, int]:
    """The child with the greatest (max(priority, 0), count, recency), see `history/index.py`; empty: all end here.

    Third: `_least_shared` of it; fourth: the sum of its rewards. `total`: that of the node's, or NOT_SUMMED.
    """
    if depth < MOST_SHARED and _is_small(index, low, high):
        start, end, total = _best_of_small(index, low, high, depth, total)
        # What ends here is a child of its own, of one suffix, and takes no part.
        if end - start > 1 or token_at(index, start, depth) >= 0:
            return start, end, _least_shared(index, start, end), total
    start = first_at_least(index, low, high, depth, 0)
    best_start, best_end, best_priority = start, start, -1
    while start < high:
        end = child_end(index, start, high, depth)
        priority = max(_priority(index, start, end), 0)
        if _is_better(index, start, end, priority, best_start, best_end, best_priority):
            best_start, best_end, best_priority = start, end, priority
        start = end
    return best_start, best_end, _least_shared(index, best_start, best_end), NOT_SUMMED


@njit(cache=True, nogil=True)
def _best_of_small(index: Int64s, low: int, high: int, depth: int, total: int) -> tuple[int, int, int]:
    """As `_best_child` for a small node with branches at `depth`, but what ends here takes part; also its rewards' sum.

    A child that most suffixes are in comes last: what the others sum up to is less work than its own sum.
    """
    count = high - low
    # A bit for each suffix that begins a child.
    starts = ~bytes_at_least(index[SHARED] + low, depth + 1) & ((1 << count) - 1) | 1
    best_start, best_end, best_priority, best_sum, of_others = low, low, -1, 0, 0
    most_start, most_end = low, low
    while starts:
        start = low + trailing_zeros(starts)
        starts &= starts - 1
        end = min(low + trailing_zeros(starts), high)
        if 2 * (end - start) > count:
            most_start, most_end = start, end
            continue
        found = _sum_one_by_one(index, start, end)
        of_others += found
        priority = max(found, 0)
        if _is_better(index, start, end, priority, best_start, best_end, best_priority):
            best_start, best_end, best_priority, best_sum = start, end, priority, found
    if most_start < most_end:
        found = _sum_one_by_one(index, most_start, most_end) if total == NOT_SUMMED else total - of_others
        priority = max(found, 0)
        if _is_better(index, most_start, most_end, priority, best_start, best_end, best_priority):
            best_start, best_end, best_sum = most_start, most_end, found
    return best_start, best_end, best_sum


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
    if high - low <= SUM_EVERY:
        return _sum_one_by_one(index, low, high)
    first, last = -(-low // SUM_EVERY), high // SUM_EVERY
    whole = int64_of(index[SUMS], last) - int64_of(index[SUMS], first)
    before, behind = _sum_one_by_one(index, low, first * SUM_EVERY), _sum_one_by_one(index, last * SUM_EVERY, high)
    return before + whole + behind


@njit(cache=True, nogil=True)
def _sum_one_by_one(index: Int64s, low: int, high: int) -> int:
    """`_priority`, of few suffixes."""
    total = 0
    for place in range(low, high):
        total += int64_of(index[REWARDS], uint16_of(index[GRADES], place))
    return total
