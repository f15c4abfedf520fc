"""Tier 2: how many engines each rank group gets, so that finishing times rise linearly (RhymeRL 6.4, figure 12).

With long-tailed lengths and equal shares, finishing times rise exponentially, and no order of the steps compensates.
The plan gives each rank group the fewest engines with which it is done at t0 + i * d. A binary search finds the
smallest gradient d for which there are enough engines.

Where the figure is silent or wrong:
- It prints t0 = max(tau(lens[0]), MAX_WKS), t_train); meant is max(tau(lens[0], MAX_WKS), t_train).
- That t0 gives the shortest rank group the most engines of all, and more than there are, unless training takes longer.
  We try several t0: as if the shortest rank group had 1, 2, 4, ... engines, never before t_train; the figure's is the
  last of them where it is feasible.
- Its d_max looks at the last rank group only, and can be infeasible (or negative). Ours is the smallest d at which all
  others are content with one engine, so a plan is always found.
- Its precision is a second; ours is a fraction of d_max, since steps of a small model take less than that.
- Engines left over go, one at a time, to the rank group that would finish last.
- Bounds of a rank group's engines are left out: each has one at least. Tier 1 makes no more rank groups than engines.
- The smallest gradient is not always the shortest cycle (an odd and an even step, in opposite order). Over unequal
  shares, linear times are no longer linear over the engines. A rank group with more than half of the engines meets
  itself in the next step. So a search begins at the figure's plan and shifts engines between rank groups while the
  cycle becomes shorter. It takes the first shift that helps. The steepest descent comes closer to the shortest cycle
  of this model, but gives 0 to 10 % fewer samples a second in simulated runs, where lengths spread within a rank group.
- A plan is taken only if neither its cycle is longer nor its idle share larger than those of equal shares.

Invariants:
- Each share is one engine or more, and the shares add up to the engines.
- The cycle is never longer, and the idle share never larger, than with equal shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.scheduling.rank_groups import engines_by_group

# tau(l, dp): seconds in which `dp` engines generate a rank group of mean length `l`; it must not grow with dp.
GroupSeconds = Callable[[float, int], float]
# Plans looked at after the figure's: each takes some 30 us, and planning a step must not be felt.
MOST_LOOKS = 600
# The gradient is found to this part of its range: finer than whole engines can follow.
PRECISION = 1 / 1024


@dataclass(frozen=True)
class EngineShares:
    """A plan: engines and predicted seconds of each rank group.

    `gradient`: seconds from one rank group's target to the next; None for equal shares. `cycle_seconds`: the longest
    that an engine is busy over an odd and an even step; `idle_share`: of all engines' time in such a cycle.
    """

    engines: tuple[int, ...]
    seconds: tuple[float, ...]
    gradient: float | None
    cycle_seconds: float
    idle_share: float


def plan_shares(
    lengths: Sequence[float], engines: int, group_seconds: GroupSeconds, training_seconds: float = 0.0
) -> EngineShares:
    """Return the plan for rank groups of these mean lengths (ascending) on `engines` engines.

    `training_seconds`: of the last training step; the first rank group need not be done before it. Raises ValueError
    without rank groups, or with more of them than engines.
    """
    groups = len(lengths)
    if not 1 <= groups <= engines:
        raise ValueError(f"{groups} rank groups cannot share {engines} engines")
    known: dict[tuple[int, int], float] = {}

    def seconds(group: int, count: int) -> float:
        if (group, count) not in known:
            known[group, count] = group_seconds(lengths[group], count)
        return known[group, count]

    equal = _judged(equal_shares(groups, engines), engines, seconds, None)
    if groups == 1:
        return equal

    def judged(shares: Sequence[int], gradient: float | None) -> EngineShares:
        return _judged(tuple(shares), engines, seconds, gradient)

    best = equal
    for start in _first_targets(groups, engines, seconds, training_seconds):
        found = smallest_gradient(groups, engines, seconds, start)
        if found is None:
            continue
        gradient, shares = found
        plan = judged(_with_leftovers(shares, engines, seconds), gradient)
        if plan.idle_share <= equal.idle_share and plan.cycle_seconds < best.cycle_seconds:
            best = plan
    return _shifted(best, lambda shares: judged(shares, best.gradient), equal.idle_share, engines)


def _shifted(
    best: EngineShares, judged: Callable[[Sequence[int]], EngineShares], most_idle: float, engines: int
) -> EngineShares:
    """Return the plan after shifting engines between rank groups, many at once first, while the cycle gets shorter."""
    groups = len(best.engines)
    looks = 0
    size = max(1, engines // (2 * groups))
    while size:
        improved = False
        for giver in range(groups):
            for taker in range(groups - 1, -1, -1):
                if giver == taker or best.engines[giver] <= size:
                    continue
                looks += 1
                if looks > MOST_LOOKS:
                    return best
                shares = list(best.engines)
                shares[giver] -= size
                shares[taker] += size
                plan = judged(shares)
                if plan.cycle_seconds < best.cycle_seconds and plan.idle_share <= most_idle:
                    best, improved = plan, True
        if not improved:
            size //= 2
    return best


def _first_targets(
    groups: int, engines: int, seconds: Callable[[int, int], float], training_seconds: float
) -> list[float]:
    """Return values of t0 to try: the shortest rank group's time with 1, 2, 4, ... engines."""
    largest = engines - (groups - 1)
    counts = [1]
    while counts[-1] < largest:
        counts.append(min(2 * counts[-1], largest))
    return sorted({max(seconds(0, count), training_seconds) for count in counts})


def smallest_gradient(
    groups: int, engines: int, seconds: Callable[[int, int], float], start: float
) -> tuple[float, list[int]] | None:
    """(d, shares): rank group i is done within `start` + i * d; d is the smallest possible within PRECISION.

    `seconds(group, engines)` must not grow with the engines. None if the first rank group cannot be done by `start`.
    """

    def shares_for(gradient: float) -> list[int] | None:
        shares = []
        for group in range(groups):
            share = _fewest_within(start + group * gradient, group, seconds, engines)
            if share is None:
                return None
            shares.append(share)
        return shares if sum(shares) <= engines else None

    flat = shares_for(0.0)
    if flat is not None:
        return 0.0, flat
    high = max((seconds(group, 1) - start) / group for group in range(1, groups))
    # The division may have rounded a target to just below what it was made from.
    high += PRECISION * abs(high)
    found = shares_for(high)
    if found is None:
        return None
    low, precision = 0.0, high * PRECISION
    while high - low > precision:
        middle = (low + high) / 2
        shares = shares_for(middle)
        if shares is None:
            low = middle
        else:
            found, high = shares, middle
    return high, found


def _fewest_within(target: float, group: int, seconds: Callable[[int, int], float], engines: int) -> int | None:
    """Return the fewest engines with which the rank group takes at most `target`; None if all are too few."""
    low, high = 1, engines
    if seconds(group, high) > target:
        return None
    while low < high:
        middle = (low + high) // 2
        if seconds(group, middle) <= target:
            high = middle
        else:
            low = middle + 1
    return high


def _with_leftovers(shares: Sequence[int], engines: int, seconds: Callable[[int, int], float]) -> tuple[int, ...]:
    filled = list(shares)
    for _ in range(engines - sum(filled)):
        # Of equal times the longer rank group: its responses can surprise by more.
        filled[max(range(len(filled)), key=lambda group: (seconds(group, filled[group]), group))] += 1
    return tuple(filled)


def equal_shares(groups: int, engines: int) -> tuple[int, ...]:
    """Return equal numbers of engines for all rank groups; the longest ones get one of those left over."""
    whole, over = divmod(engines, groups)
    return tuple(whole + (group >= groups - over) for group in range(groups))


def _judged(
    shares: tuple[int, ...], engines: int, seconds: Callable[[int, int], float], gradient: float | None
) -> EngineShares:
    times = tuple(seconds(group, share) for group, share in enumerate(shares))
    # The engines on which both steps' rank groups stay the same are judged together.
    ranges = [engines_by_group(step, shares) for step in (1, 2)]
    edges = sorted({edge for step in ranges for places in step for edge in (places.start, places.stop)})
    odd = sorted((places.stop, time) for places, time in zip(ranges[0], times, strict=True))
    even = sorted((places.stop, time) for places, time in zip(ranges[1], times, strict=True))
    cycle = total = 0.0
    at_odd = at_even = 0
    for begin, end in itertools.pairwise(edges):
        while odd[at_odd][0] <= begin:
            at_odd += 1
        while even[at_even][0] <= begin:
            at_even += 1
        busy = odd[at_odd][1] + even[at_even][1]
        cycle = max(cycle, busy)
        total += busy * (end - begin)
    idle = 1 - total / (engines * cycle) if cycle else 0.0
    return EngineShares(shares, times, gradient, cycle, idle)
