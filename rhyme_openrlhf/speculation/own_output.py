"""Drafts from a sample's own prompt and response so far: text that repeats itself needs no history.

Long answers repeat themselves (a list worked through, a value carried along, a loop), and the longest ones, which
decide how long a rollout takes, do so most. vLLM's ngram and suffix methods draft from this too. It is what drafts in
the first epoch, when a prompt has no history yet.

The most recent earlier occurrence of the last `shortest` tokens is found through a table of positions and followed as
long as it goes on matching, so that a match may be any number of tokens long.

Invariants: adding a token costs the same however many there are; a sample takes 12 to 24 bytes a token; a table slot
that another sequence of tokens took over loses a match and never gives a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

# Tokens a sample starts with room for; doubled when it has more.
FIRST_CAPACITY = 256
# Slots in the table for each token there is room for: with half of them free, few are taken over.
SLOTS_PER_TOKEN = 2
# How far back a new match is measured. Longer ones are all the same: certain enough.
LONGEST_MEASURED = 32


class OwnOutput:
    """One sample's tokens, and where the end of them occurred before."""

    def __init__(self, shortest: int) -> None:
        """`shortest`: fewest tokens that count as a match, at least 1."""
        self._shortest = shortest
        self._tokens: Int32s = np.empty(FIRST_CAPACITY, dtype=np.int32)
        self._table: Int32s = np.zeros(FIRST_CAPACITY * SLOTS_PER_TOKEN, dtype=np.int32)
        self._count = 0
        self._source = 0
        self.match_length = 0

    def __len__(self) -> int:
        """Tokens seen."""
        return self._count

    def extend(self, tokens: Sequence[int]) -> None:
        """The sample went on by `tokens`. Afterwards `match_length` is how many of its last tokens occurred before."""
        if not len(tokens):
            return
        count = self._count + len(tokens)
        if count > self._tokens.size:
            self._grow(count)
        self._tokens[self._count : count] = tokens
        self._follow(self._count, count)
        self._count = count

    def draft(self, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the match; where it reaches the end, what follows repeats."""
        if not self.match_length or limit <= 0:
            return []
        found = self._tokens[self._source : min(self._source + limit, self._count)].tolist()
        period = len(found)
        while len(found) < limit:
            found.append(found[len(found) - period])
        return found

    def _grow(self, count: int) -> None:
        capacity = self._tokens.size
        while capacity < count:
            capacity *= 2
        tokens = np.empty(capacity, dtype=np.int32)
        tokens[: self._count] = self._tokens[: self._count]
        self._tokens = tokens
        self._table = np.zeros(capacity * SLOTS_PER_TOKEN, dtype=np.int32)
        kept = self._source, self.match_length
        self._follow(0, self._count)
        self._source, self.match_length = kept

    def _follow(self, start: int, end: int) -> None:
        self._source, self.match_length = _follow(
            self._tokens, self._table, start, end, self._shortest, self._source, self.match_length
        )


@numba.njit(cache=True, nogil=True)
def _follow(
    tokens: Int32s, table: Int32s, start: int, end: int, shortest: int, source: int, length: int
) -> tuple[int, int]:
    """Enter the tokens from `start` to `end`; returns where the text after the match begins, and the match's length."""
    mask = table.size - 1
    for at in range(start, end):
        if length and tokens[source] == tokens[at]:
            source += 1
            length += 1
        else:
            length = 0
        if at + 1 < shortest:
            continue
        # FNV-1a over the last `shortest` tokens.
        slot = np.uint64(14695981039346656037)
        for back in range(shortest):
            slot = (slot ^ np.uint64(tokens[at - back])) * np.uint64(1099511628211)
        place = np.int64((slot ^ (slot >> np.uint64(29))) & np.uint64(mask))
        earlier = table[place]
        if not length and earlier:
            while (
                length < LONGEST_MEASURED and length < earlier and tokens[earlier - 1 - length] == tokens[at - length]
            ):
                length += 1
            if length < shortest:
                length = 0
            source = earlier
        table[place] = at + 1
    return source, length
