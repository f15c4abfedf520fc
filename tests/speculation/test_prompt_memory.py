"""A prompt's tables: those that it had are asked beside the new one, the oldest are dropped, and all is given back."""

from __future__ import annotations

import numpy as np

from rhyme_openrlhf.speculation import rows as columns
from rhyme_openrlhf.speculation.prompt_memory import FIRST_BUCKETS, MOST_BUCKETS, PromptMemory
from rhyme_openrlhf.speculation.slabs import Slabs
from rhyme_openrlhf.speculation.text_memory import GROWTH

ROW = 3


def tables_of(prompt: np.ndarray) -> list[tuple[int, int]]:
    """The address of each table, and its buckets."""
    flat = prompt[columns.TABLE : columns.TABLE_ENTERED].tolist()
    return list(zip(flat[::2], flat[1::2], strict=True))


def test_a_crowded_table_gets_a_larger_one_beside_it() -> None:
    memory, prompt = PromptMemory(Slabs()), np.zeros(columns.PROMPT_COLUMNS, dtype=np.int64)
    memory.begin(ROW, prompt)
    (first, buckets), *none = tables_of(prompt)
    assert first and buckets == FIRST_BUCKETS and none == [(0, 0)] * (columns.TABLES - 1)
    kept = tables_of(prompt)[:1]
    for _ in range(columns.TABLES + 1):
        prompt[columns.TABLE_ENTERED] = 7
        memory.grow(ROW, prompt)
        assert prompt[columns.TABLE_ENTERED] == 0
        newest, *others = tables_of(prompt)
        assert newest[1] == min(GROWTH * kept[0][1], MOST_BUCKETS)
        kept = [newest, *kept]
        assert [newest, *others] == (kept + none)[: columns.TABLES]
    assert len({address for address, _ in tables_of(prompt)}) == columns.TABLES


def test_what_is_dropped_is_taken_again() -> None:
    memory, prompt = PromptMemory(Slabs()), np.zeros(columns.PROMPT_COLUMNS, dtype=np.int64)
    memory.begin(ROW, prompt)
    memory.grow(ROW, prompt)
    had, votes, size = tables_of(prompt), int(prompt[columns.VOTES]), memory.nbytes()
    assert votes and size
    memory.drop(ROW, prompt)
    assert memory.nbytes() == 0
    assert not prompt[columns.TABLE : columns.VOTES + 1].any()
    memory.drop(ROW, prompt)
    memory.begin(ROW, prompt)
    memory.grow(ROW, prompt)
    assert (tables_of(prompt), int(prompt[columns.VOTES]), memory.nbytes()) == (had, votes, size)
