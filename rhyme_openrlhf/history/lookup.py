"""The compiled half of a draft index: the longest match (RhymeRL, section 5.2); `history/walk.py` goes on from it.

Works on the arrays of `history/index.py`, whose invariants it relies on, by a row of their addresses (columns below),
and allocates nothing: `history/cursor.py` asks for one sample, `speculation/draft_step.py` for those of a whole step.

A node of the tree is an interval [low, high) of the sorted suffixes that have their first `depth` tokens in common.
Where the interval is small, its ends and its children's are read from the numbers of tokens that neighbours share,
which lie side by side; where it is large, they are searched for.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import TOGETHER, bytes_at_least, int32_of, leading_zeros, trailing_zeros, uint8_of

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

# CRC-32 of the module above whose compiled functions are called here. Numba's cache notices a change of this file only,
# so a change of that one has to change this one too (tests/speculation/test_draft_step.py says the number).
CALLED_SOURCES = 1887220376

# An index: the addresses of its arrays, and its tokens.
TOKENS, SUFFIXES, PLACES, SHARED, GRADES, SUMS, REWARDS, TOKEN_COUNT = range(8)
INDEX_COLUMNS = 8

# What a uint8 says of how many tokens neighbours share: so many, or more.
MOST_SHARED = 255
# Suffixes between two prefix sums of rewards: their grades are one cache line.
SUM_EVERY = 32
# Neighbours that are looked at one by one before their node's end is searched for.
LOOKED_AT = 64
# All bits of TOGETHER bytes' comparison.
ALL = (1 << TOGETHER) - 1


@njit(cache=True, nogil=True)
def longest_match(index: Int64s, text: Int32s, longest: int, shortest: int) -> tuple[int, int, int]:
    """The node of the longest end of `text` that occurs and goes on: low, high, length.

    Of `longest` down to `shortest` tokens; all are 0 without one. Negative ids in `text` match nothing.
    """
    usable = 0
    while usable < text.size and usable < longest and text[text.size - 1 - usable] >= 0:
        usable += 1
    if usable < shortest:
        return 0, 0, 0
    # Whatever follows a longer match follows its end too: so the longest is found by bisection. The first guess is the
    # longest there can be, because most samples go on as they did before. Where that fails, what occurs of it says
    # where the sample left the history: the next guess begins right behind, and where it fits it is mostly the longest.
    # Where it fails too, the shortest comes next, because then often none fits.
    best, best_low, best_high = 0, 0, 0
    length, low_end, high_end = usable, shortest, usable
    while low_end <= high_end:
        low, high, occurs = _match(index, text, length)
        guess = 0
        if low < high and goes_on(index, high, length):
            if not best:
                guess = length + 1
            best, best_low, best_high = length, low, high
            low_end = length + 1
        elif length == shortest:
            return 0, 0, 0
        else:
            high_end = length - 1
            if not best:
                guess = max(shortest, length - occurs - 1) if length == usable else shortest
        length = min(guess, high_end) if guess else (low_end + high_end + 1) >> 1
    return best_low, best_high, best


@njit(cache=True, nogil=True)
def _match(index: Int64s, text: Int32s, length: int) -> tuple[int, int, int]:
    """The interval [low, high) of the suffixes that begin with the last `length` of `text`; empty where none does.

    Third: how many of the `length` tokens, from the first on, occur at all.
    """
    start = text.size - length
    low, high = 0, index[TOKEN_COUNT]
    # How many tokens the suffixes around [low, high) share with the text: all between them share the fewer.
    before, behind = 0, 0
    while low < high:
        middle = (low + high) >> 1
        at = int32_of(index[SUFFIXES], middle)
        same = min(before, behind)
        # No token of `text` is a separator: a suffix that is shorter differs at its own at the latest.
        while same < length and int32_of(index[TOKENS], at + same) == text[start + same]:
            same += 1
        if same < length and int32_of(index[TOKENS], at + same) < text[start + same]:
            low = middle + 1
            before = same
        else:
            high = middle
            behind = same
    if behind < length:
        return low, low, max(before, behind)
    return low, node_end(index, low, length), length


@njit(cache=True, nogil=True)
def token_at(index: Int64s, place: int, depth: int) -> int:
    """The token behind the first `depth` of the suffix at `place`."""
    return int32_of(index[TOKENS], int32_of(index[SUFFIXES], place) + depth)


@njit(cache=True, nogil=True)
def goes_on(index: Int64s, high: int, depth: int) -> bool:
    """Whether any suffix of the node that ends at `high` has a token behind `depth`.

    Separators sort first: if the last suffix goes on with one, all of them do.
    """
    return token_at(index, high - 1, depth) >= 0


@njit(cache=True, nogil=True)
def node_end(index: Int64s, place: int, depth: int) -> int:
    """Where the suffixes end that have their first `depth` tokens in common with the one at `place`."""
    end, count = place + 1, index[TOKEN_COUNT]
    if depth <= MOST_SHARED:
        near = min(count, end + LOOKED_AT)
        while end + TOGETHER <= near:
            alike = trailing_zeros(bytes_at_least(index[SHARED] + end, depth) ^ ALL)
            if alike < TOGETHER:
                return end + alike
            end += TOGETHER
        while end < near and uint8_of(index[SHARED], end) >= depth:
            end += 1
        if end < near or end == count:
            return end
    # Doubling steps, then bisection.
    model = int32_of(index[SUFFIXES], place)
    last, step = end - 1, 1
    while last + step < count and _same(index, model, last + step, depth):
        last += step
        step *= 2
    first, last = last + 1, min(last + step, count)
    while first < last:
        middle = (first + last) >> 1
        if _same(index, model, middle, depth):
            first = middle + 1
        else:
            last = middle
    return first


@njit(cache=True, nogil=True)
def node_begin(index: Int64s, place: int, depth: int) -> int:
    """Where the suffixes begin that have their first `depth` tokens in common with the one at `place`."""
    begin = place
    if depth <= MOST_SHARED:
        near = max(0, begin - LOOKED_AT)
        while begin - TOGETHER >= near:
            # The byte of `begin` itself is the highest.
            alike = leading_zeros(bytes_at_least(index[SHARED] + begin - TOGETHER + 1, depth) ^ ALL) - (64 - TOGETHER)
            if alike < TOGETHER:
                return begin - alike
            begin -= TOGETHER
        while begin > near and uint8_of(index[SHARED], begin) >= depth:
            begin -= 1
        if begin > near or begin == 0:
            return begin
    model = int32_of(index[SUFFIXES], place)
    step = 1
    while begin - step >= 0 and _same(index, model, begin - step, depth):
        begin -= step
        step *= 2
    first, last = max(0, begin - step + 1), begin
    while first < last:
        middle = (first + last) >> 1
        if _same(index, model, middle, depth):
            last = middle
        else:
            first = middle + 1
    return first


@njit(cache=True, nogil=True)
def _same(index: Int64s, model: int, place: int, depth: int) -> bool:
    """Whether the suffix at `place` begins with the `depth` tokens from position `model` on."""
    at = int32_of(index[SUFFIXES], place)
    for behind in range(depth):
        if int32_of(index[TOKENS], at + behind) != int32_of(index[TOKENS], model + behind):
            return False
    return True


@njit(cache=True, nogil=True)
def child_of(index: Int64s, low: int, high: int, depth: int, token: int) -> tuple[int, int]:
    """The child of the node [low, high) that `token` leads to; empty where there is none."""
    low = first_at_least(index, low, high, depth, token)
    if low == high or token_at(index, low, depth) != token:
        return low, low
    return low, child_end(index, low, high, depth)


@njit(cache=True, nogil=True)
def first_at_least(index: Int64s, low: int, high: int, depth: int, token: int) -> int:
    """First place in [low, high) whose token at `depth` is at least `token`; `high` if there is none."""
    if low < high and token_at(index, low, depth) >= token:
        return low
    while low < high:
        middle = (low + high) >> 1
        if token_at(index, middle, depth) < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def child_end(index: Int64s, low: int, high: int, depth: int) -> int:
    """End of the child that begins at `low`, of a node that ends at `high`."""
    near = min(high, low + LOOKED_AT)
    if depth < MOST_SHARED:
        end = low + 1
        while end + TOGETHER <= near:
            alike = trailing_zeros(bytes_at_least(index[SHARED] + end, depth + 1) ^ ALL)
            if alike < TOGETHER:
                return end + alike
            end += TOGETHER
        while end < near and uint8_of(index[SHARED], end) > depth:
            end += 1
        if end < near or end == high:
            return end
        low = end - 1
    # Doubling steps, then bisection.
    token = token_at(index, low, depth)
    step = 1
    while low + step < high and token_at(index, low + step, depth) == token:
        low += step
        step *= 2
    return first_at_least(index, low + 1, min(low + step, high), depth, token + 1)
