"""A step that is divided among threads drafts what one thread alone does, whoever does which part."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.speculation import rows as columns
from rhyme_openrlhf.speculation.live_texts import LEAST_HELPED, LiveTexts
from rhyme_openrlhf.speculation.step_parts import DRAFTED, LEFT, OPEN, PART, gather
from rhyme_openrlhf.speculation.step_threads import StepThreads

SAMPLES, PROMPTS, CONTEXT = 2 * LEAST_HELPED, 24, 4
MOST = HistoSpecSettings().window_max


@pytest.fixture
def helped() -> Iterator[StepThreads]:
    threads = StepThreads(2)
    yield threads
    threads.end()


class Engine:
    """Samples whose responses are known, of prompts with history, as one engine has them."""

    def __init__(self, threads: StepThreads, seed: int = 3) -> None:
        rng = random.Random(seed)
        self.texts = LiveTexts(HistoSpecSettings(), threads)
        base = [rng.randrange(200) for _ in range(600)]
        self.full, self.rows = [], []
        for prompt in range(PROMPTS):
            said = [rng.randrange(200) if rng.random() < 0.05 else token for token in base]
            self.texts.install(str(prompt), DraftIndex.from_buffer(build_index([Piece(base[:CONTEXT], said, 1.0)])))
        # Samples of a prompt are not beside each other, and prompts have one sample or many.
        for _ in range(SAMPLES):
            prompt = str(int(rng.random() ** 2 * PROMPTS))
            self.rows.append(self.texts.start(prompt, CONTEXT, 9000, 2))
            self.full.append(base[:CONTEXT] + [rng.randrange(200) if rng.random() < 0.1 else t for t in base])
        self.lists: list[list[int]] = [[] for _ in self.rows]

    def step(self, sizes: list[int], whole: bool) -> tuple[list[list[int]], list[list[int]], list[float]]:
        """Each sample gets so many tokens more; drafts, all that is said of each, and confidences."""
        for text, full, size in zip(self.lists, self.full, sizes, strict=True):
            text += full[len(text) : len(text) + size]
        drafts = self.texts.draft(self.rows, self.lists, whole)
        said = [drafts.lengths, drafts.sources, drafts.matches, drafts.recents]
        found = drafts.tokens(), [one.tolist() for one in said], drafts.confidences.tolist()
        rows = [row for row, draft in zip(self.rows, found[0], strict=True) if draft]
        self.texts.verified(np.array([*rows, *[2] * len(rows), *[1 + row % 2 for row in rows]]))
        return found


def test_threads_draft_what_one_alone_does(helped: StepThreads) -> None:
    rng = random.Random(4)
    alone, together = Engine(StepThreads(0)), Engine(helped)
    drafted = set[int]()
    for number in range(40):
        sizes = [rng.randrange(12) for _ in range(SAMPLES)]
        expected = alone.step(sizes, bool(number % 2))
        assert together.step(sizes, bool(number % 2)) == expected
        drafted.update(expected[1][1])
    assert drafted >= {columns.FROM_HISTORY, columns.FROM_SIBLINGS, columns.FROM_OWN}
    assert (alone.texts._samples[:, columns.ENOUGH] == together.texts._samples[:, columns.ENOUGH]).all()
    assert not together.texts._prompts[:, columns.HERE].any()


def test_a_part_is_all_of_some_prompts() -> None:
    engine = Engine(StepThreads(0))
    engine.step([9] * SAMPLES, False)
    found, samples = engine.texts._found, engine.texts._samples
    parts = int(found[columns.STATUS, 0])
    begins = found[columns.BEGINS, : parts + 1].tolist()
    assert parts > 2 and (begins[0], begins[-1]) == (0, SAMPLES)
    assert all(end - begin >= PART for begin, end in zip(begins[:-2], begins[1:-1], strict=True))
    ordered, numbers = found[columns.ORDERED, :SAMPLES], found[columns.NUMBERS, :SAMPLES]
    assert [engine.rows[number] for number in numbers] == ordered.tolist()
    prompts = samples[ordered, columns.PROMPT]
    of_parts = [set(prompts[begin:end]) for begin, end in zip(begins[:-1], begins[1:], strict=True)]
    assert sum(map(len, of_parts)) == len(set.union(*of_parts))
    for prompt in set(prompts):
        assert (np.diff(numbers[prompts == prompt]) > 0).all()


def test_texts_that_are_too_small_grow_between_parts(helped: StepThreads) -> None:
    """So many tokens at once that several parts cannot go on."""
    alone, together = Engine(StepThreads(0)), Engine(helped)
    for engine in (alone, together):
        engine.full = [full * 10 for full in engine.full]
    rng = random.Random(5)
    sizes = [5000 if rng.random() < 0.05 else 40 for _ in range(SAMPLES)]
    assert sum(size == 5000 for size in sizes) > 3
    for _ in range(2):
        assert together.step(sizes, False) == alone.step(sizes, False)


def test_tokens_may_be_what_is_like_an_int(helped: StepThreads) -> None:
    alone, together = Engine(StepThreads(0)), Engine(helped)
    together.full = [[*map(np.int64, full)] if number % 7 == 0 else full for number, full in enumerate(together.full)]  # type: ignore[arg-type,misc]
    for _ in range(3):
        assert together.step([8] * SAMPLES, False) == alone.step([8] * SAMPLES, False)


def test_helpers_do_all_parts_that_nobody_else_takes(helped: StepThreads) -> None:
    engine = Engine(helped)
    engine.step([60] * SAMPLES, False)
    texts, found = engine.texts, engine.texts._found
    drafts = texts.draft(engine.rows, engine.lists)
    expected, confidences = drafts.flat.tolist(), drafts.confidences.tolist()
    texts._out[:] = -1
    parts = int(found[columns.STATUS, 0])
    found[columns.REACHED, :parts] = found[columns.BEGINS, :parts]
    found[columns.STATUS, 1 : 1 + parts] = OPEN
    helped._words[LEFT] = parts
    for _ in range(helped.helpers):
        helped._library.sem_post(helped._semaphore)
    waited_until = time.monotonic() + 30
    while (found[columns.STATUS, 1 : 1 + parts] != DRAFTED).any():
        assert time.monotonic() < waited_until
    flat, of_flat = np.empty_like(texts._out), np.empty_like(texts._confidences)
    total = gather(found, SAMPLES, MOST, texts._out, texts._confidences, flat, of_flat)
    assert (flat[:total].tolist(), of_flat[:total].tolist()) == (expected, confidences)
