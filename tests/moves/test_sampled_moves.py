"""Samples without a seed, with drafts, that move: their tokens still follow the model's distribution, at the seam too.

The test uses the probability integral transform: the quantile of each token in the model's distribution for its context
is uniform if the token was drawn from that distribution. A discrete value is spread evenly over its share. So every
context may be different.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.proof.chi_square import P_VALUE_FLOOR, chi_square
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE, Phase
from tests.moves.engines import Engines, request

pytestmark = pytest.mark.slow

SAMPLES = 64
TOGETHER = 14
TOKENS = 160
SEAM = 5
CLASSES = 10


def places(prompt: list[int], tokens: list[int], model: Any, chance: random.Random) -> list[float]:
    """Of each response token: its place in the distribution behind those before it, from 0 to 1."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    probabilities = torch.softmax(logits, dim=-1).numpy()
    below = np.cumsum(probabilities, axis=-1)
    return [below[i, t] - chance.random() * probabilities[i, t] for i, t in enumerate(tokens)]


def uniform(found: list[float]) -> float:
    """The chance of places at least so far from uniform."""
    counts = np.bincount(np.minimum((np.array(found) * CLASSES).astype(int), CLASSES - 1), minlength=CLASSES)
    p_value = chi_square(counts.tolist(), [1.0] * CLASSES).p_value
    assert p_value is not None
    return p_value


def test_tokens_of_moved_samples_follow_the_model(pair: Engines, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    chance = random.Random(11)
    prompts = [[chance.randrange(5, 100) for _ in range(40)] for _ in range(8)]
    asked = [
        request(prompts[i % len(prompts)], f"prompt {i % len(prompts)}", temperature=1.0, max_tokens=TOKENS)
        for i in range(SAMPLES)
    ]
    seams: dict[int, list[int]] = {}

    async def grown(sample: KeptSample, tokens: int) -> None:
        while len(sample.known.tokens) < tokens and not sample.answer.done():
            await asyncio.sleep(0.005)

    async def one(keeper: SampleKeeper, mover: Mover, number: int, turn: asyncio.Semaphore) -> list[int]:
        async with turn:
            running = asyncio.create_task(keeper.generate(asked[number], number % 2))
            await asyncio.sleep(0)
            sample = next(one for one in keeper._samples.values() if one.request is asked[number])
            for tokens in (30, 90):
                await grown(sample, tokens)
                pair.carrier = chance.choice([KV_TRANSFER, RECOMPUTE])
                record = await mover.move(sample, 1 - (sample.engine or 0), "reallocation")
                if record.move.phase is Phase.RUNNING:
                    # By when the record is made some tokens may have come: the seam is among the last ones.
                    seams.setdefault(number, []).append(record.tokens - len(asked[number].prompt))
            return list((await running)[0].outputs[0].token_ids)

    async def test(keeper: SampleKeeper, mover: Mover) -> list[list[int]]:
        turn = asyncio.Semaphore(TOGETHER)
        return await asyncio.gather(*(one(keeper, mover, number, turn) for number in range(SAMPLES)))

    answers = pair.run(test, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(embedded.MODEL).float().eval()
    drawn = random.Random(12)
    everywhere, around = [], []
    for number, tokens in enumerate(answers):
        assert len(tokens) == TOKENS
        found = places(list(asked[number].prompt), tokens, model, drawn)
        everywhere += found
        for seam in seams.get(number, []):
            around += found[max(seam - SEAM, 0) : seam + SEAM]
    assert sum(map(len, seams.values())) > SAMPLES and len(around) > 5 * SAMPLES
    assert uniform(everywhere) > P_VALUE_FLOOR
    assert uniform(around) > P_VALUE_FLOOR


def test_a_token_that_is_lost_or_doubled_at_a_seam_would_be_found() -> None:
    """The test above, of tokens that a fault there would leave behind."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    model = AutoModelForCausalLM.from_pretrained(embedded.MODEL).float().eval()
    set_seed(1)
    chance = random.Random(13)
    right, lost, doubled = [], [], []
    for _ in range(40):
        prompt = [chance.randrange(5, 100) for _ in range(40)]
        with torch.no_grad():
            asked = torch.tensor([prompt])
            made = model.generate(asked, do_sample=True, top_k=0, max_new_tokens=40, min_new_tokens=40, pad_token_id=0)
        made = made[0, len(prompt) :].tolist()
        right += places(prompt, made, model, chance)[18:30]
        lost += places(prompt, made[:20] + made[21:], model, chance)[18:29]
        doubled += places(prompt, made[:20] + made[19:], model, chance)[18:30]
    assert uniform(lost) < P_VALUE_FLOOR and uniform(doubled) < P_VALUE_FLOOR < uniform(right)
