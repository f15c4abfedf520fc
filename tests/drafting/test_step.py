"""A step of many samples drafts what steps of one prompt each do."""

from __future__ import annotations

import random
from typing import Any

from rhyme_openrlhf.drafting.drafter import FROM_HISTORY, FROM_OWN, FROM_SIBLINGS
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index

# Several groups of a step (csrc/drafter.cpp).
SAMPLES, PROMPTS, CONTEXT = 256, 24, 4
RULES = {
    "longest": 16, "shortest": 2, "siblings": True, "own_output": True, "window_start": 2, "window_step": 2,
    "window_max": 32, "extend_confidence": 0.7, "stop_confidence": 0.5, "shared_tokens": 0,
}  # fmt: skip


class Engine:
    """Samples whose responses are known, of prompts with history, as one engine has them."""

    def __init__(self, times: int = 1) -> None:
        rng = random.Random(3)
        self.drafter = core.Drafter(**RULES)
        base = [rng.randrange(200) for _ in range(600)]
        self.full: list[list[int]] = []
        self.samples: list[int] = []
        self.prompts: list[str] = []
        for prompt in range(PROMPTS):
            said = [rng.randrange(200) if rng.random() < 0.05 else token for token in base]
            index = DraftIndex.from_buffer(build_index([Piece(base[:CONTEXT], said, 1.0)]))
            self.drafter.install(str(prompt), index.compiled)
        # Samples of a prompt are not beside each other, and prompts have one sample or many.
        for _ in range(SAMPLES):
            prompt = str(int(rng.random() ** 2 * PROMPTS))
            self.prompts.append(prompt)
            self.samples.append(self.drafter.start(prompt, [], CONTEXT, 9000, 2))
            full = base[:CONTEXT] + [rng.randrange(200) if rng.random() < 0.1 else token for token in base]
            self.full.append(full * times)
        self.written = [0] * SAMPLES

    def step(self, sizes: list[int], whole: bool, together: bool) -> dict[int, list[Any]]:
        """Add `sizes` tokens to the samples; return each sample's draft, drafted for `together` or prompt by prompt."""
        new = [full[at : at + size] for full, at, size in zip(self.full, self.written, sizes, strict=True)]
        self.written = [at + len(part) for at, part in zip(self.written, new, strict=True)]
        self.drafter.append(self.samples, *core.flatten(new))
        found: dict[int, list[Any]] = {}
        drafted: list[int] = []
        for prompt in [None] if together else sorted(set(self.prompts)):
            samples = [one for one, of in zip(self.samples, self.prompts, strict=True) if prompt in (None, of)]
            lengths, tokens, _, sources, matches, _ = self.drafter.draft(samples, whole)
            drafts = core.split(tokens, lengths)
            found.update((one, list(rest)) for one, *rest in zip(samples, drafts, sources, matches, strict=True))
            drafted += [sample for sample, length in zip(samples, lengths, strict=True) if length]
        drafted.sort()
        self.drafter.computing()
        self.drafter.verified(drafted, [1] * len(drafted), [sample % 2 for sample in drafted])
        return found


def test_a_step_drafts_what_its_prompts_alone_do() -> None:
    rng = random.Random(4)
    alone, together = Engine(), Engine()
    sources = set[int]()
    # So few steps that no table grows: a call gives memory to a few samples only.
    for number in range(24):
        # Some steps enter their tokens before they draft, and larger ones afterwards.
        sizes = [rng.randrange(6 if number % 4 == 0 else 12) for _ in range(SAMPLES)]
        expected = alone.step(sizes, bool(number % 2), together=False)
        assert together.step(sizes, bool(number % 2), together=True) == expected
        sources.update(int(source) for _, source, _ in expected.values())
    assert sources >= {FROM_HISTORY, FROM_SIBLINGS, FROM_OWN}
    assert alone.drafter.memory_bytes == together.drafter.memory_bytes


def test_texts_that_are_too_small_grow() -> None:
    """Many tokens arrive at once, more than several texts and tables have room for: samples draft from them too."""
    engine = Engine(times=10)
    before = engine.drafter.memory_bytes
    # Each text repeats itself after CONTEXT + 600 tokens, ten times.
    sizes = [5000 if number % 20 == 0 else 40 for number in range(SAMPLES)]
    engine.step(sizes, False, together=True)
    drafts = engine.step([40] * SAMPLES, False, together=True)
    assert engine.drafter.memory_bytes > before
    long = [number for number in range(SAMPLES) if number % 20 == 0]
    right = [
        engine.full[number][(at := engine.written[number]) : at + 1] == drafts[engine.samples[number]][0][:1]
        for number in long
    ]
    assert sum(right) > 0.8 * len(right)
