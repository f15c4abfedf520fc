"""Where one sample is in a draft index, so that its next match is mostly known and not searched for.

A sample mostly goes on as the history that it was drafted from. Then its longest match is the last one with the new
tokens behind it, at a known position of the text, whose place among the sorted suffixes is stored; and where its last
token is another one than there, that is mostly another branch of the same node. Only what is left is searched for.

Invariants:
- What `follow` finds is what `lookup.longest_match` finds.
- A match grows by as many tokens as the text at most: the longest match of a text less its last k tokens, and k, are a
  bound for the longest match of the text. So a cursor of a match never misses a longer one, and after a search without
  a result only the few lengths are searched for that there can be since.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import TOGETHER, int32_of, prefetch, uint8_of
from rhyme_openrlhf.history.lookup import (
    GRADES,
    PLACES,
    SHARED,
    SUFFIXES,
    TOKEN_COUNT,
    TOKENS,
    child_of,
    goes_on,
    longest_match,
    node_begin,
    node_end,
)

# As CALLED_SOURCES of lookup.py, of lookup.py and what it calls.
CALLED_SOURCES = 3753370144

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# A cursor: where in the index's tokens the match goes on, its length (0: no match); a bound for the length of the
# longest match (LENGTH if there is one); and how many tokens the sample had then.
AT, LENGTH, BOUND, SEEN = range(4)
CURSOR_COLUMNS = 4

# New tokens that are followed one by one; those of more are searched for. A draft and one more are at most 65.
MOST_FOLLOWED = 65
# Bytes of a token or a place, of a grade, and of a cache line.
WORD, HALF_WORD, LINE = 4, 2, 64
# Of history's text behind a cursor: new tokens and a draft are at most 65, in five lines; mostly less.
FORESEEN_LINES = 4


@njit(cache=True, nogil=True)
def follow(index: Int64s, cursor: Int64s, text: Int32s, longest: int, least: int) -> tuple[int, int, int, int]:
    """The node of the longest end of `text` that occurs and goes on: low, high, length, and a place in between.

    Of `longest` down to `least` tokens; all are 0 without one. `text` is what it was the last time, and what came
    since; `longest` is always the same. Negative ids in `text` match nothing.
    """
    length, at, bound = _followed(index, cursor, text, longest, least)
    low = high = place = 0
    if length:
        place = int32_of(index[PLACES], at - length)
        low, high = node_begin(index, place, length), node_end(index, place, length)
        if int32_of(index[TOKENS], at) < 0 and not goes_on(index, high, length):
            length, bound = 0, length - 1
    if not length and bound >= least:
        low, high, length = longest_match(index, text, bound, least)
        place, bound = low, length if length else least - 1
        if length:
            at = int32_of(index[SUFFIXES], low) + length
    cursor[AT], cursor[LENGTH], cursor[BOUND], cursor[SEEN] = at, length, bound, text.size
    if length < least:
        return 0, 0, 0, 0
    return low, high, length, place


@njit(cache=True, nogil=True)
def _followed(index: Int64s, cursor: Int64s, text: Int32s, longest: int, least: int) -> tuple[int, int, int]:
    """The longest match as far as it is known without a search: its length, where it goes on in the index, and a bound.

    It occurs; whether it goes on has to be seen. Length 0: what it is has to be searched for, below the bound.
    """
    seen, count = cursor[SEEN], text.size
    length, at, bound = cursor[LENGTH], cursor[AT], min(longest, cursor[BOUND] + count - seen)
    if not length or longest == 1 or count - seen > MOST_FOLLOWED:
        return 0, 0, bound
    for number in range(seen, count):
        token = text[number]
        if token < 0:
            return 0, 0, bound
        most = min(longest, length + 1)
        if token == int32_of(index[TOKENS], at):
            at += 1
        else:
            # It may be another branch of the same node.
            low, high = _branch(index, at, most, token)
            if low == high:
                bound = min(longest, most - 1 + count - 1 - number)
                return _shorter(index, at, bound, least, token) if number == count - 1 else (0, 0, bound)
            at = int32_of(index[SUFFIXES], low) + most
        length = most
    return length, at, length


@njit(cache=True, nogil=True)
def _branch(index: Int64s, at: int, length: int, token: int) -> tuple[int, int]:
    """The node of `length` tokens (2 or more): those before position `at`, and `token`. Empty if it does not occur."""
    place = int32_of(index[PLACES], at - (length - 1))
    low, high = node_begin(index, place, length - 1), node_end(index, place, length - 1)
    return child_of(index, low, high, length - 1, token)


@njit(cache=True, nogil=True)
def _shorter(index: Int64s, at: int, bound: int, least: int, token: int) -> tuple[int, int, int]:
    """As `_followed`, where the text ends with the tokens before `at` and another `token`, that are at most `bound`.

    What follows a longer match follows its end too: so the longest is found by bisection, from the least on, because
    often there is none.
    """
    if bound < least or least == 1:
        return 0, 0, bound
    best, best_at = 0, 0
    length, low_end, high_end = least, least, bound
    while low_end <= high_end:
        low, high = _branch(index, at, length, token)
        if low < high and goes_on(index, high, length):
            best, best_at = length, int32_of(index[SUFFIXES], high - 1) + length
            low_end = length + 1
        elif length == least:
            return 0, 0, least - 1
        else:
            high_end = length - 1
        length = (low_end + high_end + 1) >> 1
    return best, best_at, best


@njit(cache=True, nogil=True)
def move_to(cursor: Int64s, at: int) -> None:
    """The sample is expected to go on as the suffix that begins at `at`, and begins with its match."""
    cursor[AT] = at + cursor[LENGTH]


@njit(cache=True, nogil=True)
def foresee_text(index: Int64s, cursor: Int64s, count: int, longest: int) -> None:
    """Fetch what `follow` will read first, for a text of now `count` tokens: history there, and its suffix's place."""
    if cursor[LENGTH]:
        new = count - cursor[SEEN]
        bound = min(longest, cursor[BOUND] + new)
        text = index[TOKENS] + WORD * cursor[AT]
        for line in range(FORESEEN_LINES):
            prefetch(text + LINE * line)
        prefetch(index[PLACES] + WORD * (cursor[AT] + new - bound))


@njit(cache=True, nogil=True)
def foresee_node(index: Int64s, cursor: Int64s, count: int, longest: int) -> None:
    """Fetch what `follow` will read next, after `foresee_text`: the node around that suffix."""
    if cursor[LENGTH]:
        new = count - cursor[SEEN]
        start = cursor[AT] + new - min(longest, cursor[BOUND] + new)
        if start < index[TOKEN_COUNT]:
            place = int32_of(index[PLACES], start)
            # Neighbours are looked at in both directions.
            prefetch(index[SHARED] + place - TOGETHER + 1)
            prefetch(index[SHARED] + place + TOGETHER)
            prefetch(index[SUFFIXES] + WORD * place)


@njit(cache=True, nogil=True)
def foresee_branch(index: Int64s, cursor: Int64s, count: int, longest: int) -> None:
    """Fetch what is read last, after `foresee_node`: the rewards of the node, and what its first suffix says."""
    if cursor[LENGTH]:
        new = count - cursor[SEEN]
        bound = min(longest, cursor[BOUND] + new)
        start = cursor[AT] + new - bound
        if start < index[TOKEN_COUNT]:
            place = int32_of(index[PLACES], start)
            near = max(0, place - LINE // WORD)
            while place > near and uint8_of(index[SHARED], place) >= bound:
                place -= 1
            prefetch(index[GRADES] + HALF_WORD * place)
            text = index[TOKENS] + WORD * (int32_of(index[SUFFIXES], place) + bound)
            prefetch(text)
            prefetch(text + LINE)
