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

from rhyme_openrlhf.history.addresses import int32_of, prefetch, uint8_of
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
CALLED_SOURCES = 2953375035

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# A cursor: where in the index's tokens the match goes on, its length (0: no match); a bound for the length of the
# longest match (LENGTH if there is one); and how many tokens the sample had then.
AT, LENGTH, BOUND, SEEN = range(4)
CURSOR_COLUMNS = 4

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
    seen, count = cursor[SEEN], text.size
    cursor[SEEN] = count
    new = count - seen
    length = cursor[LENGTH]
    bound = min(longest, cursor[BOUND] + new)
    if length:
        at, same = cursor[AT], 0
        while same < new and text[seen + same] == int32_of(index[TOKENS], at + same) and text[seen + same] >= 0:
            same += 1
        at += same
        if same == new and int32_of(index[TOKENS], at) >= 0:
            cursor[AT], cursor[LENGTH], cursor[BOUND] = at, bound, bound
            if bound < least:
                return 0, 0, 0, 0
            place = int32_of(index[PLACES], at - bound)
            return node_begin(index, place, bound), node_end(index, place, bound), bound, place
        if same == new - 1 and bound > 1:
            place = int32_of(index[PLACES], at - (bound - 1))
            low, high = node_begin(index, place, bound - 1), node_end(index, place, bound - 1)
            low, high = child_of(index, low, high, bound - 1, max(0, text[count - 1]))
            if low < high and goes_on(index, high, bound) and text[count - 1] >= 0:
                at = int32_of(index[SUFFIXES], low) + bound
                cursor[AT], cursor[LENGTH], cursor[BOUND] = at, bound, bound
                if bound < least:
                    return 0, 0, 0, 0
                return low, high, bound, low
            bound -= 1
    low = high = length = 0
    if bound >= least:
        low, high, length = longest_match(index, text, bound, least)
        bound = length if length else least - 1
    cursor[LENGTH], cursor[BOUND] = length, bound
    if length:
        cursor[AT] = int32_of(index[SUFFIXES], low) + length
    return low, high, length, low


@njit(cache=True, nogil=True)
def move_to(index: Int64s, cursor: Int64s, place: int) -> None:
    """The sample is expected to go on as the suffix at `place`, which begins with its match."""
    cursor[AT] = int32_of(index[SUFFIXES], place) + cursor[LENGTH]


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
            prefetch(index[SHARED] + place)
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
