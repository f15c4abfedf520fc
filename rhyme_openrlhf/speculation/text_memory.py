"""The memory of samples' texts, and of the tables of their own texts: how much each has, and when it gets more.

Invariants: a row's addresses always belong to arrays that are kept here; a text that grows keeps its tokens, and a
table that grows has entries of all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.speculation import rows as columns
from rhyme_openrlhf.speculation import text_tables as tables
from rhyme_openrlhf.speculation.slabs import Slabs

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

# Tokens that a sample's text has room for at first, at most (what it can come to, if that is less), and the table of
# its own text; both get GROWTH times as much when they are full. Memory that grows is written again, so it grows
# seldom, and before it must, of some samples a step: those that began together would else grow in the same step.
FIRST_TOKENS, FIRST_TABLED, GROWTH = 4096, 1024, 4
LEAST_TOKENS = 64
NEVER_ENOUGH = 1 << 62
# Share of a text's room that is full when it should grow.
FULL = 0.75
# Bytes between texts beside their room: with a power of two, the tokens of texts that are as long as each other would
# all be in the same few sets of a cache.
APART = 64
# Slots in the table of a sample's own text for each token there is room for: half are free, so few are taken over.
SLOTS_PER_TOKEN = 2


class TextMemory:
    """Of all samples of an engine, by row."""

    def __init__(self, slabs: Slabs, own: bool, shortest: int) -> None:
        """`own`: with tables of own texts, of `shortest` tokens each."""
        self._slabs = slabs
        self._own = own
        self._shortest = shortest
        self._texts: dict[int, Int32s] = {}
        self._own_tables: dict[int, Int32s] = {}

    def grow(self, row: int, sample: Int64s, needed: int) -> None:
        """Room for `needed` tokens, and more, in the text of the sample of `row` and in the table of its own text."""
        count, capacity, limit = sample[[columns.COUNT, columns.CAPACITY, columns.LIMIT]].tolist()
        most = max(LEAST_TOKENS, needed, limit)
        if needed > FULL * capacity and capacity < most:
            capacity = _size(max(needed, capacity + 1), FIRST_TOKENS, most)
            text, earlier = self._slabs.take(np.int32, capacity + APART // 4), self._texts.get(row)
            if earlier is not None:
                text[:count] = earlier[:count]
                self._slabs.give(earlier)
            self._texts[row] = text
            sample[columns.TEXT], sample[columns.CAPACITY] = text.ctypes.data, capacity
        tabled = most
        if self._own:
            table = self._own_tables.get(row)
            tabled = 0 if table is None else table.size // SLOTS_PER_TOKEN
            if needed > tabled and tabled < most:
                tabled = _size(needed, FIRST_TABLED, most)
                self._new_table(row, sample, tabled)
        sample[columns.ENOUGH] = min(
            tabled if tabled < most else NEVER_ENOUGH, int(FULL * capacity) if capacity < most else NEVER_ENOUGH
        )

    def _new_table(self, row: int, sample: Int64s, tokens: int) -> None:
        """A table of the sample's own text, with room for so many tokens."""
        table, earlier = self._slabs.take(np.int32, tokens * SLOTS_PER_TOKEN), self._own_tables.get(row)
        if earlier is not None:
            self._slabs.give(earlier)
        table[:] = 0
        count = int(sample[columns.COUNT])
        tables.follow_own(self._texts[row], table.ctypes.data, table.size - 1, count, self._shortest)
        self._own_tables[row] = table
        sample[columns.OWN_TABLE], sample[columns.OWN_SLOTS] = table.ctypes.data, table.size

    def drop(self, row: int) -> None:
        """The sample of `row` has no text any more."""
        for arrays in (self._texts, self._own_tables):
            if (array := arrays.pop(row, None)) is not None:
                self._slabs.give(array)

    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(array.nbytes for arrays in (self._texts, self._own_tables) for array in arrays.values())


def _size(needed: int, first: int, most: int) -> int:
    """Room for `needed` tokens, in steps of GROWTH from `first` on: a power of two, less than twice `most`."""
    room = first
    while room < needed:
        room *= GROWTH
    while room >= 2 * most:
        room //= 2
    return room
