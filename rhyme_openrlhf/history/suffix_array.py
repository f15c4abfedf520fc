"""The suffix array of a draft index: where the suffixes of a text start, in lexicographic order, and what they share.

Prefix doubling (Manber and Myers 1993): O(n log n) however much the text repeats itself, in 28 bytes a token while it
works.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.lookup import MOST_SHARED

Int32s = NDArray[np.int32]
Uint8s = NDArray[np.uint8]

# Radix keys are int64 and must not be negative.
KEY_BITS = 63


def suffix_array(text: Int32s) -> tuple[Int32s, Int32s]:
    """Start positions of the suffixes of `text` in lexicographic order, int32[n], and each one's place in it, int32[n].

    Prefix doubling (Manber and Myers 1993), O(n log n) even where the text only repeats itself. The first round
    sorts by as many tokens as fit one 64-bit key, which spares the rounds for 1, 2 and often 4 tokens.
    """
    if text.size == 0:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
    values, dense = np.unique(text, return_inverse=True)
    bits = values.size.bit_length()
    width = min(KEY_BITS // bits, text.size)
    keys = np.zeros(text.size, dtype=np.int64)
    for offset in range(width):
        keys <<= bits
        keys[: text.size - offset] |= dense[offset:] + 1  # 0 stays for: the text has ended
    order = np.argsort(keys).astype(np.int32)
    ordered = keys[order]
    heads = np.zeros(text.size, dtype=np.int32)
    heads[1:] = np.where(ordered[1:] != ordered[:-1], np.arange(1, text.size), 0)
    ranks = np.empty(text.size, dtype=np.int32)
    ranks[order] = np.maximum.accumulate(heads)
    return order, _refine(order, ranks, width)


@njit(cache=True, nogil=True)
def _refine(order: Int32s, ranks: Int32s, width: int) -> Int32s:
    """Sort `order` in place from "by the first `width` tokens" to "by all tokens"; returns each suffix's place in it.

    `ranks[i]`: where the group of suffixes that equal suffix i so far begins in `order`. Overwritten.
    """
    count = order.size
    by_second = np.empty(count, dtype=np.int32)
    new_ranks = np.empty(count, dtype=np.int32)
    free = np.empty(count, dtype=np.int32)
    while True:
        # All suffixes in the order of what follows their first `width` tokens: `order` itself, moved by `width`.
        filled = 0
        for suffix in range(count - width, count):
            by_second[filled] = suffix
            filled += 1
        for place in range(count):
            free[place] = place
            if order[place] >= width:
                by_second[filled] = order[place] - width
                filled += 1
        for place in range(count):
            suffix = by_second[place]
            group = ranks[suffix]
            order[free[group]] = suffix
            free[group] += 1
        head = 0
        groups = 1
        new_ranks[order[0]] = 0
        for place in range(1, count):
            before, suffix = order[place - 1], order[place]
            # Two of one group have `width` equal tokens, none of them a separator: so both go on behind them.
            if ranks[before] != ranks[suffix] or ranks[before + width] != ranks[suffix + width]:
                head = place
                groups += 1
            new_ranks[suffix] = head
        if groups == count:
            return new_ranks
        ranks, new_ranks = new_ranks, ranks
        width *= 2


@njit(cache=True, nogil=True)
def shared_tokens(text: Int32s, order: Int32s, places: Int32s, shared: Uint8s) -> None:
    """Fill `shared`: how many first tokens each suffix has in common with the one sorted before it, or MOST_SHARED.

    In the order of the text a suffix has at most one token less in common than the one before it (Kasai and others
    2001), so this is linear.
    """
    length = 0
    for suffix in range(order.size):
        place = places[suffix]
        if place == 0:
            shared[0] = length = 0
            continue
        before = order[place - 1]
        # A separator occurs once: no two suffixes are equal as far as the text goes.
        while text[suffix + length] == text[before + length]:
            length += 1
        shared[place] = min(length, MOST_SHARED)
        length = max(0, length - 1)
