"""The memory of prompts' tables: of where their samples' tokens occurred, and of what mostly followed a token.

Invariants: a row's addresses always belong to arrays that are kept here; a table that is crowded gets a larger one
beside it, and is never entered again into that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.speculation import rows as columns
from rhyme_openrlhf.speculation import text_tables as tables
from rhyme_openrlhf.speculation.likely_next import SLOT, SLOTS
from rhyme_openrlhf.speculation.slabs import Slabs
from rhyme_openrlhf.speculation.text_memory import GROWTH

Int64s = NDArray[np.int64]

# Buckets of a prompt's first table, and at most: the next one has GROWTH times as many. A new one is zeroed within a
# step, and 1.3 MB take some tens of microseconds.
FIRST_BUCKETS, MOST_BUCKETS = 4096, 32768


class PromptMemory:
    """Of all prompts of an engine, by row."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        # Of each row, the newest first.
        self._tables: dict[int, list[Int64s]] = {}
        self._votes: dict[int, Int64s] = {}

    def begin(self, row: int, prompt: Int64s) -> None:
        """Nothing is known of what the samples of the prompt of `row` say."""
        self._tables[row] = []
        self._new_table(row, prompt, FIRST_BUCKETS)
        votes = self._votes[row] = self._slabs.take(np.int64, SLOT * SLOTS)
        votes[:] = 0
        prompt[columns.VOTES] = votes.ctypes.data

    def grow(self, row: int, prompt: Int64s) -> None:
        """What is entered from now on goes into a larger table."""
        self._new_table(row, prompt, min(GROWTH * int(prompt[columns.TABLE_BUCKETS]), MOST_BUCKETS))

    def _new_table(self, row: int, prompt: Int64s, buckets: int) -> None:
        table: Int64s = self._slabs.take(np.int64, tables.table_size(buckets))
        table[:] = 0
        kept = self._tables[row]
        kept.insert(0, table)
        for dropped in kept[columns.TABLES :]:
            self._slabs.give(dropped)
        del kept[columns.TABLES :]
        of_tables = prompt[columns.TABLE : columns.TABLE_ENTERED]
        of_tables[columns.TABLE_COLUMNS :] = of_tables[: -columns.TABLE_COLUMNS].copy()
        of_tables[: columns.TABLE_COLUMNS] = table.ctypes.data, buckets
        prompt[columns.TABLE_ENTERED] = 0

    def drop(self, row: int, prompt: Int64s) -> None:
        """The prompt of `row` has no tables any more, if it had any."""
        for table in self._tables.pop(row, []):
            self._slabs.give(table)
        if (votes := self._votes.pop(row, None)) is not None:
            self._slabs.give(votes)
        prompt[columns.TABLE : columns.VOTES + 1] = 0

    def nbytes(self) -> int:
        """Bytes of all of it."""
        arrays = [*self._votes.values(), *(table for kept in self._tables.values() for table in kept)]
        return sum(array.nbytes for array in arrays)
