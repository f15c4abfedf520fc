"""The compiled half of a draft index: the longest match, and the best continuation of it (RhymeRL, sections 5.2, 5.3).

Works on the three arrays of `history/index.py`, whose invariants it relies on, and allocates nothing: one caller asks
for one draft, another (`speculation/draft_step.py`) for those of a whole decode step.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

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
    tokens: Int32s,
    suffixes: Int32s,
    prefix_sums: Int64s,
    text: Int32s,
    longest: int,
    shortest: int,
    out: Int32s,
    confidence: Float32s,
) -> tuple[int, int]:
    """Fill `out` with what follows the longest end of `text` that occurs; returns (tokens found, tokens matched).

    Matches from `longest` down to `shortest` tokens; both results are 0 without one. `confidence[i]` becomes the
    estimated probability that the draft is right up to and including token i. Negative ids in `text` match nothing.
    """
    usable = 0
    while usable < text.size and usable < longest and text[text.size - 1 - usable] >= 0:
        usable += 1
    if usable < shortest:
        return 0, 0
    # Whatever follows a longer match follows its end too: so the longest is found by bisection. The first guess is the
    # longest there can be, because most samples go on as they did before. Where that fails, what occurs of it says
    # where the sample left the history: the next guess begins right behind, and where it fits it is mostly the longest.
    # Where it fails too, the shortest comes next, because then often none fits.
    best, best_low, best_high = 0, 0, 0
    length, low_end, high_end = usable, shortest, usable
    while low_end <= high_end:
        low, high, occurs = _match(tokens, suffixes, text, length)
        guess = 0
        # Separators sort first: if the last suffix goes on with one, all of them do.
        if low < high and tokens[suffixes[high - 1] + length] >= 0:
            if not best:
                guess = length + 1
            best, best_low, best_high = length, low, high
            low_end = length + 1
        elif length == shortest:
            return 0, 0
        else:
            high_end = length - 1
            if not best:
                guess = max(shortest, length - occurs - 1) if length == usable else shortest
        length = min(guess, high_end) if guess else (low_end + high_end + 1) >> 1
    if not best:
        return 0, 0
    return _walk(tokens, suffixes, prefix_sums, best_low, best_high, best, out, confidence), best


@njit(cache=True, nogil=True)
def _match(tokens: Int32s, suffixes: Int32s, text: Int32s, length: int) -> tuple[int, int, int]:
    """The interval [low, high) of the suffixes that begin with the last `length` of `text`; empty where none does.

    Third: how many of the `length` tokens, from the first on, occur at all.
    """
    start = text.size - length
    low, high = 0, suffixes.size
    # How many tokens the suffixes around [low, high) share with the text: all between them share the fewer.
    before, behind = 0, 0
    while low < high:
        middle = (low + high) >> 1
        at = suffixes[middle]
        same = _shared(tokens, at, text, start, length, min(before, behind))
        if same < length and tokens[at + same] < text[start + same]:
            low = middle + 1
            before = same
        else:
            high = middle
            behind = same
    if behind < length:
        return low, low, max(before, behind)
    # Doubling steps, then bisection: most intervals are small.
    step, end = 1, low
    while end + step < suffixes.size and _shared(tokens, suffixes[end + step], text, start, length, 0) == length:
        end += step
        step *= 2
    first, last = end + 1, min(end + step, suffixes.size)
    while first < last:
        middle = (first + last) >> 1
        if _shared(tokens, suffixes[middle], text, start, length, 0) == length:
            first = middle + 1
        else:
            last = middle
    return low, first, length


@njit(cache=True, nogil=True)
def _shared(tokens: Int32s, suffix: int, text: Int32s, start: int, length: int, known: int) -> int:
    """How many of the `length` tokens of `text` from `start` on the suffix begins with, `known` of them for sure.

    No token of `text` is a separator: a suffix that is shorter differs at its own at the latest, so nothing behind
    `tokens` is read.
    """
    while known < length and tokens[suffix + known] == text[start + known]:
        known += 1
    return known


@njit(cache=True, nogil=True)
def _walk(
    tokens: Int32s,
    suffixes: Int32s,
    prefix_sums: Int64s,
    low: int,
    high: int,
    depth: int,
    out: Int32s,
    confidence: Float32s,
) -> int:
    """Follow the best child from the node [low, high) at `depth` tokens; returns how many of `out` were filled."""
    found = 0
    sure = 1.0
    while found < out.size:
        last = tokens[suffixes[high - 1] + depth]
        if last < 0:
            break
        count = high - low
        if tokens[suffixes[low] + depth] != last:
            low, high = _best_child(tokens, suffixes, prefix_sums, low, high, depth)
        sure *= ((high - low) + CONFIDENCE_A) / (count + CONFIDENCE_B)
        if depth < SURE_MATCH:
            sure *= SHORT_MATCH_FACTOR
        out[found] = tokens[suffixes[low] + depth]
        confidence[found] = sure
        found += 1
        depth += 1
    return found


@njit(cache=True, nogil=True)
def _best_child(
    tokens: Int32s, suffixes: Int32s, prefix_sums: Int64s, low: int, high: int, depth: int
) -> tuple[int, int]:
    """The child interval with the greatest (max(priority, 0), count, recency), see the module docstring."""
    start = _first_at_least(tokens, suffixes, low, high, depth, 0)
    best_start, best_end, best_priority = start, start, -1
    while start < high:
        end = _child_end(tokens, suffixes, start, high, depth)
        priority = max(prefix_sums[end] - prefix_sums[start], 0)
        better = priority > best_priority
        if priority == best_priority:
            gain = (end - start) - (best_end - best_start)
            better = gain > 0
            if gain == 0:
                # Rare enough that scanning the two intervals is cheaper than keeping range maxima for all of them.
                better = suffixes[start:end].max() > suffixes[best_start:best_end].max()
        if better:
            best_start, best_end, best_priority = start, end, priority
        start = end
    return best_start, best_end


@njit(cache=True, nogil=True)
def _first_at_least(tokens: Int32s, suffixes: Int32s, low: int, high: int, depth: int, token: int) -> int:
    """First place in [low, high) whose token at `depth` is at least `token`; `high` if there is none."""
    while low < high:
        middle = (low + high) >> 1
        if tokens[suffixes[middle] + depth] < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _child_end(tokens: Int32s, suffixes: Int32s, low: int, high: int, depth: int) -> int:
    """End of the child that begins at `low`: doubling steps, then bisection, as most children are small."""
    token = tokens[suffixes[low] + depth]
    step = 1
    while low + step < high and tokens[suffixes[low + step] + depth] == token:
        low += step
        step *= 2
    return _first_at_least(tokens, suffixes, low + 1, min(low + step, high), depth, token + 1)
