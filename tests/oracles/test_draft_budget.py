"""RLHFSpec 5.3, equation 2, by its text: most tokens a second of all ways to cut a batch's drafts."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from rhyme_openrlhf.drafting.budget import choose

PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
CASES = 300
# Probabilities are compared by their exponent and eight bits behind it.
ROUNDING = 2.0**-7


def tokens(drafts: list[list[float]], cut: tuple[int, ...]) -> float:
    """One sure token for each sample, and a draft token where it and all before it are accepted."""
    return len(drafts) + sum(
        math.prod(draft[: place + 1]) for draft, length in zip(drafts, cut, strict=True) for place in range(length)
    )


def steps(draw: random.Random, most: int) -> list[float]:
    """Seconds of a step with 0 to `most` draft tokens: a line, stairs or noise."""
    each, kind = draw.choice([0.01, 0.1, 0.4]), draw.choice(["line", "stairs", "noise"])
    if kind == "line":
        return [1 + each * drafts for drafts in range(most + 1)]
    if kind == "stairs":
        return [1 + each * 4 * math.ceil(drafts / 4) for drafts in range(most + 1)]
    return [draw.uniform(0.5, 3.0) for _ in range(most + 1)]


@pytest.mark.parametrize("part", PARTS)
def test_no_cut_and_no_uniform_length_is_better(part: int) -> None:
    draw = random.Random(part)
    for _ in range(CASES):
        drafts = [[draw.uniform(0.3, 1.0) for _ in range(draw.randint(0, 4))] for _ in range(draw.randint(1, 4))]
        seconds = steps(draw, 16)
        flat = np.array([one for draft in drafts for one in draft], dtype=np.float32)
        found = choose(flat, np.array([len(draft) for draft in drafts]), np.array(seconds), len(drafts))
        cut = tuple(found.lengths.tolist())
        assert sum(cut) == found.drafts and all(n <= len(draft) for n, draft in zip(cut, drafts, strict=True))
        ours = tokens(drafts, cut) / seconds[sum(cut)]
        every = itertools.product(*(range(len(draft) + 1) for draft in drafts))
        assert ours >= (1 - ROUNDING) * max(tokens(drafts, one) / seconds[sum(one)] for one in every)
        uniform = (tuple(min(n, len(draft)) for draft in drafts) for n in range(5))
        assert ours >= (1 - ROUNDING) * max(tokens(drafts, one) / seconds[sum(one)] for one in uniform)
