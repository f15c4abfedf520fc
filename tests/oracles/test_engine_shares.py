"""RhymeRL 6.4 and figure 12 by their text: the smallest gradient, and the shares with the shortest cycle of all."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest

from rhyme_openrlhf.scheduling.engine_shares import PRECISION, plan_shares, smallest_gradient

PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
GRADIENTS, ALLOCATIONS = 60, 30


def allocations(groups: int, engines: int) -> Iterator[tuple[int, ...]]:
    """All ways to give `groups` rank groups `engines` engines, each one at least."""
    for bars in itertools.combinations(range(1, engines), groups - 1):
        edges = (0, *bars, engines)
        yield tuple(end - begin for begin, end in itertools.pairwise(edges))


def tau(fixed: float, samples: int) -> Callable[[float, int], float]:
    """tau(l, dp) of decoding: each of l steps has a fixed part and one for each sample of an engine."""
    return lambda length, engines: length * (fixed + math.ceil(samples / engines))


def drawn(draw: random.Random, groups: int) -> list[float]:
    return sorted(200 * math.exp(draw.gauss(0, draw.choice([0.3, 1.0]))) for _ in range(groups))


@pytest.mark.parametrize("part", PARTS)
def test_the_gradient_of_figure_12_is_the_smallest(part: int) -> None:
    """t_i = t0 + i * d: d is the smallest for which each rank group's fewest engines within t_i are enough in all."""
    draw = random.Random(part)
    for _ in range(GRADIENTS):
        groups = draw.randint(2, 5)
        engines = draw.randint(groups, 12)
        lengths, seconds = drawn(draw, groups), tau(draw.choice([0, 5, 60]), draw.choice([16, 128]))
        start = seconds(lengths[0], draw.randint(1, engines))
        best = math.inf
        for total in range(groups, engines + 1):
            for shares in allocations(groups, total):
                if seconds(lengths[0], shares[0]) <= start:
                    late = (seconds(lengths[g], shares[g]) - start for g in range(1, groups))
                    best = min(best, max(max(0.0, of) / g for g, of in enumerate(late, 1)))
        found = smallest_gradient(groups, engines, lambda g, n, of=lengths, tau=seconds: tau(of[g], n), start)
        if found is None:
            assert best == math.inf
            continue
        widest = max(0.0, max((seconds(lengths[g], 1) - start) / g for g in range(1, groups)))
        assert best - 1e-9 <= found[0] <= best + 2 * PRECISION * widest + 1e-9
        assert all(seconds(lengths[g], n) <= start + g * found[0] + 1e-9 for g, n in enumerate(found[1]))


def cycle(lengths: list[float], shares: tuple[int, ...], seconds: Callable[[float, int], float]) -> float:
    """The longest that an engine is busy over an odd step and an even one, in which the order is reversed."""
    row = [seconds(length, n) for length, n in zip(lengths, shares, strict=True) for _ in range(n)]
    return max(odd + even for odd, even in zip(row, reversed(row), strict=True))


@pytest.mark.parametrize("part", PARTS)
def test_a_plans_cycle_is_close_to_the_shortest_of_all_allocations(part: int) -> None:
    """With the usual number of rank groups, half as many as engines."""
    draw = random.Random(100 + part)
    gaps = []
    for _ in range(ALLOCATIONS):
        engines = draw.choice([8, 10, 12])
        lengths, seconds = drawn(draw, engines // 2), tau(draw.choice([5, 60]), 128)
        best = min(cycle(lengths, shares, seconds) for shares in allocations(engines // 2, engines))
        plan = plan_shares(lengths, engines, seconds)
        assert plan.cycle_seconds == pytest.approx(cycle(lengths, plan.engines, seconds))
        gaps.append(plan.cycle_seconds / best - 1)
    gaps.sort()
    print(f"{len(gaps)} plans: mean {sum(gaps) / len(gaps):.4f}, largest {gaps[-1]:.4f}")
    assert gaps[0] > -1e-9 and sum(gaps) / len(gaps) <= 0.04 and gaps[-1] <= 0.45
