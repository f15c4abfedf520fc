"""Tier-2 plans against all allocations of engines (RhymeRL 6.4), in the words of the paper's text.

Rank groups go over the engines from short to long in one step and from long to short in the next. The cycle is the time
of the engine that is busy longest over both. 300 instances of 4 to 12 engines with the usual number of rank groups; a
fifth of them run by default.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from rhyme_openrlhf.scheduling.engine_shares import plan_shares

PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
CASES = 60


def cycle(seconds: Sequence[Callable[[int], float]], shares: Sequence[int]) -> float:
    busy = [seconds[group](count) for group, count in enumerate(shares) for _ in range(count)]
    return max(odd + even for odd, even in zip(busy, reversed(busy), strict=True))


def allocations(engines: int, groups: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, engines), groups - 1):
        yield [end - begin for begin, end in itertools.pairwise((0, *cuts, engines))]


@pytest.mark.parametrize("part", PARTS)
def test_plans_are_close_to_the_best_of_all_allocations(part: int) -> None:
    draw = random.Random(part)
    gaps = []
    for _ in range(CASES):
        engines = draw.choice([4, 6, 8, 10, 12])
        groups = max(2, engines // 2)
        spread, fixed, samples = draw.choice([0.5, 1.0, 1.5]), draw.choice([5, 20, 60, 200]), draw.choice([16, 64, 256])
        lengths = sorted(200 * math.exp(draw.gauss(0, spread)) for _ in range(groups))

        def tau(length: float, count: int, fixed: int = fixed, samples: int = samples) -> float:
            return length * (fixed + math.ceil(samples / count))

        seconds = [lambda count, length=length: tau(length, count) for length in lengths]
        best = min(cycle(seconds, shares) for shares in allocations(engines, groups))
        plan = plan_shares(lengths, engines, tau)
        assert plan.cycle_seconds == pytest.approx(cycle(seconds, plan.engines))
        gaps.append(plan.cycle_seconds / best - 1)
    assert min(gaps) > -1e-9
    assert max(gaps) <= 0.15 and sum(gaps) / CASES <= 0.007
