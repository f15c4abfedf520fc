"""All compiled functions of a decode step, compiled (or loaded from Numba's cache) before the first one.

Compiling takes seconds, which no decode step should wait. Each function is called once with arguments of just the kinds
that a step has: what a step calls with others would be compiled again.

Invariant: what a step calls from Python is called here (tests/speculation/test_compile_step.py).
"""

from __future__ import annotations

import numpy as np

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.latency.step_model import compile_table
from rhyme_openrlhf.speculation.live_texts import LiveTexts
from rhyme_openrlhf.speculation.slabs import LINE_BYTES, aligned, have_pages
from rhyme_openrlhf.speculation.text_memory import FIRST_TABLED, FIRST_TOKENS, GROWTH

# Tokens that a text has at first, and later: so many that its table should grow, and so many that it has no room.
FIRST, CROWDED, TOO_MANY = 5, FIRST_TABLED + 1, FIRST_TOKENS + 1
# What it can come to: more than any of these have room for.
LIMIT = GROWTH * GROWTH * FIRST_TOKENS


class _Request:
    """As much of vLLM's request as a step reads and writes."""

    def __init__(self) -> None:
        self._all_token_ids = [0] * FIRST
        self.status = None
        self.is_prefill_chunk = False
        self.spec_token_ids: list[int] = []


def compile_step() -> None:
    """Do a step's work for a sample: found among vLLM's requests, and given by its caller."""
    compile_table()
    have_pages(aligned(LINE_BYTES))
    texts, name, request = LiveTexts(HistoSpecSettings()), "", _Request()
    row = texts.start("", 0, LIMIT, 1)
    texts.bind(row, name, request)
    texts.find_decoding([name], {name: row}, None)
    drafts = texts.draft_decoding(False)
    texts.give(drafts.flat, drafts.lengths)
    texts.draft_and_give()
    texts.verified(np.array([row, 1, 1]))
    for size in (CROWDED, TOO_MANY):
        texts.draft([row], [[0] * size]).tokens()
