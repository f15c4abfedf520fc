"""The last resort of drafting: what mostly followed a sample's last token in what its siblings and itself wrote.

For each prompt a table of slots, each a majority vote (Boyer and Moore 1981): a pair of tokens that comes again gets a
vote, any other pair of the slot takes one away, and a pair without votes is replaced. So a slot holds the pair that is
the majority of those seen in it lately, in constant time and room, and pairs of other tokens that fall into the same
slot are outvoted in the same way.

Invariant: `likely_next` never answers for another token than the one it is asked about.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# int64 of a slot: the pair + 1 (0: none yet; first token in the upper half, the one that followed in the lower), votes.
SLOT = 2
TOKEN_BITS = 32
TOKEN_MASK = (1 << TOKEN_BITS) - 1
# Multiplicative hashing (Knuth, volume 3, 6.4): 2**32 divided by the golden ratio.
GOLDEN = 2654435769


@njit(cache=True, nogil=True)
def slot_of(table: Int64s, token: int) -> int:
    """Where the slot of `token` begins; `table` has a power of two of slots."""
    mixed = (token * GOLDEN) & TOKEN_MASK
    return SLOT * ((mixed ^ (mixed >> 16)) & (table.size // SLOT - 1))


@njit(cache=True, nogil=True)
def vote_next(table: Int64s, text: Int32s, start: int, end: int) -> None:
    """Count, for the tokens of `text` from `start` (1 or more) to `end`, that each followed the one before it."""
    for at in range(start, end):
        slot = slot_of(table, text[at - 1])
        pair = ((np.int64(text[at - 1]) << TOKEN_BITS) | np.int64(text[at])) + 1
        if table[slot] == pair:
            table[slot + 1] += 1
        elif table[slot + 1] > 0:
            table[slot + 1] -= 1
        else:
            table[slot], table[slot + 1] = pair, 1


@njit(cache=True, nogil=True)
def likely_next(table: Int64s, token: int) -> int:
    """The token that mostly followed `token`; -1 where that is not known."""
    pair = table[slot_of(table, token)] - 1
    if pair < 0 or pair >> TOKEN_BITS != token:
        return -1
    return int(pair & TOKEN_MASK)
