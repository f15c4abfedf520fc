"""The last resort of drafting: what mostly followed a sample's last token in what its siblings and itself wrote.

For each prompt a table of slots, each a majority vote (Boyer and Moore 1981): a pair of tokens that comes again gets a
vote, up to MOST_VOTES, any other pair of the slot takes one away, and a pair without votes is replaced. So a slot holds
the pair that was the majority of those seen in it lately, in constant time and room, and pairs of other tokens that
fall into the same slot are outvoted in the same way.

Invariant: `likely_next` never answers for another token than the one it is asked about.
"""

from __future__ import annotations

from numba import njit

from rhyme_openrlhf.history.addresses import int64_of, put_int64

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 1887220376

# int64 of a slot: the pair + 1 (0: none yet; first token in the upper half, the one that followed in the lower), votes.
SLOT = 2
# Slots of a prompt (64 KB): its samples write that many different tokens, or not many more.
SLOTS = 4096
# A pair has no more votes, so that what is said lately soon takes over from what was said long. By replay of three
# recorded runs, in the first epoch 2 to 8 give 2 % more tokens a step than any number does, for 1 % fewer drafted ones.
MOST_VOTES = 4
TOKEN_BITS = 32
TOKEN_MASK = (1 << TOKEN_BITS) - 1
# Multiplicative hashing (Knuth, volume 3, 6.4): 2**32 divided by the golden ratio.
GOLDEN = 2654435769


@njit(cache=True, nogil=True)
def slot_of(slots: int, token: int) -> int:
    """Where the slot of `token` begins in a table of so many slots (a power of two)."""
    mixed = (token * GOLDEN) & TOKEN_MASK
    return SLOT * ((mixed ^ (mixed >> 16)) & (slots - 1))


@njit(cache=True, nogil=True)
def vote(table: int, slots: int, token: int, then: int) -> None:
    """Count that `then` followed `token`, in the table of so many slots at an address."""
    slot = slot_of(slots, token)
    pair = ((token << TOKEN_BITS) | then) + 1
    seen, votes = int64_of(table, slot), int64_of(table, slot + 1)
    # Without branches: which of the three it is, nobody can guess.
    same = seen == pair
    taken = (not same) & (votes <= 0)
    put_int64(table, slot, pair if taken else seen)
    put_int64(table, slot + 1, 1 if taken else min(votes + (1 if same else -1), MOST_VOTES))


@njit(cache=True, nogil=True)
def likely_next(table: int, slots: int, token: int) -> int:
    """The token that mostly followed `token`; -1 where that is not known."""
    pair = int64_of(table, slot_of(slots, token)) - 1
    if pair < 0 or pair >> TOKEN_BITS != token:
        return -1
    return int(pair & TOKEN_MASK)
