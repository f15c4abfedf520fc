"""RhymeRL 6.2 by its text: prompts ranked by historical length, in rank groups of equal count."""

from __future__ import annotations

import random
import statistics

import pytest

from rhyme_openrlhf.scheduling.rank_groups import engines_by_group, historical_length, rank_groups

PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
CASES = 300


@pytest.mark.parametrize("part", PARTS)
def test_rank_groups_are_the_ranking_cut_in_equal_parts(part: int) -> None:
    draw = random.Random(part)
    for _ in range(CASES):
        seen = draw.choice([1.0, 0.8, 0.3])
        prompts = [
            [draw.randint(1, 60) for _ in range(draw.randint(1, 8))] if draw.random() < seen else []
            for _ in range(draw.randint(1, 40))
        ]
        wanted = draw.randint(1, 12)
        found = rank_groups([historical_length(lengths) for lengths in prompts], wanted)
        medians = [statistics.median(lengths) for lengths in prompts if lengths]
        if not medians:
            assert found == ()
            continue
        middle = statistics.median(medians)
        lengths = [statistics.median(of) if of else middle for of in prompts]
        ranking = sorted(range(len(prompts)), key=lambda prompt: lengths[prompt])
        count, groups = len(prompts), min(wanted, len(prompts))
        # The first ones take what does not divide evenly.
        ends = [rank * (count // groups) + min(rank, count % groups) for rank in range(groups + 1)]
        assert [group.prompts for group in found] == [
            tuple(ranking[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)
        ]
        for group in found:
            own = [lengths[prompt] for prompt in group.prompts]
            assert group.longest == max(own) and group.mean_length == pytest.approx(statistics.fmean(own))


@pytest.mark.parametrize("part", PARTS)
def test_even_steps_have_the_reverse_order(part: int) -> None:
    draw = random.Random(100 + part)
    for _ in range(CASES):
        shares = [draw.randint(1, 5) for _ in range(draw.randint(1, 12))]
        odd, even = ([group for group, share in enumerate(shares) for _ in range(share)] for _ in range(2))
        even = [group for group in range(len(shares) - 1, -1, -1) for _ in range(shares[group])]
        for step, row in ((2 * draw.randint(0, 9) + 1, odd), (2 * draw.randint(1, 9), even)):
            for group, places in enumerate(engines_by_group(step, shares)):
                assert [row[engine] for engine in places] == [group] * shares[group]
                assert list(places) == [engine for engine, of in enumerate(row) if of == group]
