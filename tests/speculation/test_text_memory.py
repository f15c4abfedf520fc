"""Texts and tables grow before they must, of a few samples a step, and keep what they have."""

from __future__ import annotations

import numpy as np
import pytest

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.speculation.live_texts import GROWN_A_STEP, LiveTexts
from rhyme_openrlhf.speculation.rows import CAPACITY, COUNT, ENOUGH, LIMIT, OWN_SLOTS, SAMPLE_COLUMNS
from rhyme_openrlhf.speculation.slabs import Slabs
from rhyme_openrlhf.speculation.text_memory import FIRST_TABLED, FIRST_TOKENS, TextMemory

SAMPLES = 24


def test_samples_that_began_together_do_not_grow_together(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = LiveTexts(HistoSpecSettings())
    rows = [texts.start(f"p{number}", 1, 1 << 16, 2) for number in range(SAMPLES)]
    grown: list[int] = []
    grow = TextMemory.grow

    def count(memory: TextMemory, row: int, sample: np.ndarray, needed: int) -> None:
        grown[-1] += 1
        grow(memory, row, sample, needed)

    monkeypatch.setattr(TextMemory, "grow", count)
    said: list[list[int]] = [[] for _ in rows]
    for step in range(2 * FIRST_TOKENS // 16):
        for number, text in enumerate(said):
            text += [(step * 7 + i * number) % 911 for i in range(16)]
        grown.append(0)
        texts.draft(rows, said)
    assert max(grown) <= GROWN_A_STEP
    # Each one's table twice, and its text once.
    assert sum(grown) == 3 * SAMPLES


def test_what_is_full_gets_more_and_what_can_come_is_enough() -> None:
    memory, sample = TextMemory(Slabs(), True, 2), np.zeros(SAMPLE_COLUMNS, dtype=np.int64)
    memory.grow(0, sample, 10)
    assert sample[CAPACITY] == 64
    sample[:] = 0
    sample[LIMIT] = 1 << 20
    memory.drop(0)
    memory.grow(0, sample, 10)
    for _ in range(4):
        before = sample[[CAPACITY, OWN_SLOTS]].tolist()
        enough = int(sample[ENOUGH])
        sample[COUNT] = 0
        memory.grow(0, sample, enough + 1)
        assert sample[[CAPACITY, OWN_SLOTS]].tolist() != before
        assert sample[ENOUGH] > enough
    assert sample[CAPACITY] >= FIRST_TOKENS and sample[OWN_SLOTS] > FIRST_TABLED
    memory.drop(0)
    assert memory.nbytes() == 0
