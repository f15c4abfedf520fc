"""A step that is divided among threads drafts what one thread alone does; there are no more threads than cores."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhyme_openrlhf.drafting.drafter import FROM_HISTORY, FROM_OWN, FROM_SIBLINGS, HistoryDrafter
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings

SAMPLES, PROMPTS, CONTEXT = 2 * core.LEAST_HELPED, 24, 4
RULES = {
    "longest": 16, "shortest": 2, "siblings": True, "own_output": True, "window_start": 2, "window_step": 2,
    "window_max": 32, "extend_confidence": 0.7, "stop_confidence": 0.5, "shared_tokens": 4096,
}  # fmt: skip


class Engine:
    """Samples whose responses are known, of prompts with history, as one engine has them."""

    def __init__(self, helpers: int, times: int = 1, seed: int = 3) -> None:
        rng = random.Random(seed)
        self.drafter = core.Drafter(**RULES, helpers=helpers)
        base = [rng.randrange(200) for _ in range(600)]
        self.full: list[list[int]] = []
        self.samples: list[int] = []
        for prompt in range(PROMPTS):
            said = [rng.randrange(200) if rng.random() < 0.05 else token for token in base]
            index = DraftIndex.from_buffer(build_index([Piece(base[:CONTEXT], said, 1.0)]))
            self.drafter.install(str(prompt), index.compiled)
        # Samples of a prompt are not beside each other, and prompts have one sample or many.
        for _ in range(SAMPLES):
            prompt = str(int(rng.random() ** 2 * PROMPTS))
            self.samples.append(self.drafter.start(prompt, [], CONTEXT, 9000, 2))
            full = base[:CONTEXT] + [rng.randrange(200) if rng.random() < 0.1 else token for token in base]
            self.full.append(full * times)
        self.written = [0] * SAMPLES

    def step(self, sizes: list[int], whole: bool) -> list[list[Any]]:
        """Add `sizes` tokens to the samples; return every output of the drafter."""
        new = [full[at : at + size] for full, at, size in zip(self.full, self.written, sizes, strict=True)]
        self.written = [at + len(part) for at, part in zip(self.written, new, strict=True)]
        self.drafter.append(self.samples, *core.flatten(new))
        found = self.drafter.draft(self.samples, whole)
        drafted = [sample for sample, length in zip(self.samples, found[0], strict=True) if length]
        self.drafter.verified(drafted, [2] * len(drafted), [1 + sample % 2 for sample in drafted])
        return [array.tolist() for array in found]


def test_threads_draft_what_one_alone_does() -> None:
    rng = random.Random(4)
    alone, together = Engine(0), Engine(2)
    drafted = set[int]()
    for number in range(40):
        sizes = [rng.randrange(12) for _ in range(SAMPLES)]
        expected = alone.step(sizes, bool(number % 2))
        assert together.step(sizes, bool(number % 2)) == expected
        drafted.update(expected[3])
    assert drafted >= {FROM_HISTORY, FROM_SIBLINGS, FROM_OWN}
    assert alone.drafter.memory_bytes == together.drafter.memory_bytes


def test_texts_that_are_too_small_grow() -> None:
    """Many tokens arrive at once, more than several texts and tables have room for."""
    alone, together = Engine(0, times=10), Engine(2, times=10)
    rng = random.Random(5)
    sizes = [5000 if rng.random() < 0.05 else 40 for _ in range(SAMPLES)]
    assert sum(size == 5000 for size in sizes) > 3
    for _ in range(2):
        assert together.step(sizes, False) == alone.step(sizes, False)


def threads_here() -> int:
    """How many threads this process has."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize(("threads", "cores", "helpers"), [(1, 8, 0), (2, 8, 1), (4, 2, 1), (4, 1, 0)])
def test_no_more_threads_than_cores_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, helpers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    before = threads_here()
    drafter = HistoryDrafter(HistoSpecSettings(threads=threads))
    assert threads_here() == before + helpers
    del drafter
    assert threads_here() == before


def test_a_forked_process_drafts_without_helpers_and_ends() -> None:
    engine = Engine(1)
    sizes = [8] * SAMPLES
    engine.step(sizes, False)
    child = os.fork()
    if child == 0:
        found = engine.step(sizes, False)
        del engine
        os._exit(0 if np.sum(found[0]) else 1)
    assert os.waitpid(child, 0)[1] == 0
