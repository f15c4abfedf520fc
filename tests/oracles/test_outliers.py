"""Outliers by the text of RhymeRL 6.2 and 6.3: historical lengths are medians of response groups."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from rhyme_openrlhf.scheduling.outliers import outliers
from rhyme_openrlhf.scheduling.rank_groups import historical_length, rank_groups

PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
CASES = 300


@pytest.mark.parametrize("part", PARTS)
def test_a_rank_groups_threshold_is_its_longest_median(part: int) -> None:
    draw = random.Random(part)
    for _ in range(CASES):
        prompts = [[draw.randint(1, 60) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(2, 12))]
        groups = rank_groups([historical_length(lengths) for lengths in prompts], draw.randint(1, 4))
        for group in groups:
            medians = [statistics.median(prompts[prompt]) for prompt in group.prompts]
            samples = 4 * len(medians)
            running = {n: draw.randint(1, 90) for n in range(draw.randint(0, samples))}
            factor = draw.choice([1.1, 1.5])
            within_last = len(running) <= math.ceil(samples / 10)
            expected = {n for n, length in running.items() if within_last and length > factor * max(medians)}
            found = outliers(running, samples, group.longest, factor)
            assert set(found) == expected and len(found) == len(expected)
            # The longest first.
            assert [running[sample] for sample in found] == sorted((running[n] for n in found), reverse=True)
