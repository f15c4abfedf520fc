"""Which engine generates which prompts of a step: tier 1 and tier 2 together (RhymeRL 6.2 and 6.4).

Rank groups by the last responses' lengths; engines for each by equal shares or by `plan_shares`; inside of a rank
group, prompts by predicted work. Without any history: by load alone, which is upstream's own order.

Invariants: every prompt has one engine; a rank group's prompts are only on its engines; the same input gives the same
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.scheduling import dispatch
from rhyme_openrlhf.scheduling.engine_shares import equal_shares, most_groups, plan_shares
from rhyme_openrlhf.scheduling.group_time import GroupTime, Speculation
from rhyme_openrlhf.scheduling.rank_groups import LengthHistory, RankGroup, engines_by_group, rank_groups

# Engines of each of these rank groups, or None for equal shares.
Shares = Callable[[Sequence[RankGroup]], Sequence[int] | None]


@dataclass(frozen=True)
class StepPlacement:
    """`engine_of`: of each prompt; `rank_groups`: empty when dispatched by load; `shares`: engines of each rank group;
    `rank_group_of`: of each engine, -1 without one."""

    engine_of: tuple[int, ...]
    rank_groups: tuple[RankGroup, ...]
    shares: tuple[int, ...]
    rank_group_of: tuple[int, ...]


# RhymeRL's evaluation has 16 for math and 8 for code.
MOST_RANK_GROUPS = 16


def usual_rank_groups(engines: int) -> int:
    """How many rank groups `engines` engines have if nobody says: half as many, from 2 to MOST_RANK_GROUPS.

    With one engine for each, the longest rank group's engine decides and shares cannot make up for it: simulated with 8
    and 16 engines and log-normal lengths, that is 4 to 15 % fewer samples a second, and a quarter to two thirds more
    bubbles, than half as many rank groups.
    """
    return min(MOST_RANK_GROUPS, max(2, engines // 2))


def most_rank_groups(asked: int, engines: int) -> int:
    """Return how many rank groups a step has at most, of `asked` ones (0: the usual number); below 2 it has none."""
    return (asked or usual_rank_groups(engines)) if engines > 1 else 1


def placed(
    step: int, histories: Sequence[LengthHistory | None], engines: int, most: int, shares_of: Shares
) -> StepPlacement:
    """Return step `step` (from 1) in at most `most` rank groups; by load where there are none, or without history."""
    placement = by_rank(step, histories, engines, most, shares_of) if most > 1 else None
    return placement or by_load([None] * len(histories), engines)


def second_tier(
    groups: Sequence[RankGroup],
    engines: int,
    samples: int,
    prompt_tokens: float,
    most_running: int,
    predictor: Predictor,
    speculation: Speculation,
    training_seconds: float,
) -> tuple[int, ...] | None:
    """Return how many of the engines each rank group gets (RhymeRL 6.4); None where there is nothing to divide.

    `samples`: of the whole step; the rest as `GroupTime` and `plan_shares` take it.
    """
    if len(groups) == engines:
        return None
    each = round(samples / len(groups))
    time_of = GroupTime(predictor.step_seconds, each, prompt_tokens, most_running, speculation)
    return plan_shares([group.mean_length for group in groups], engines, time_of, training_seconds).engines


def by_load(lengths: Sequence[float | None], engines: int) -> StepPlacement:
    """Each next prompt to the engine with the least predicted work; all alike where every length is None."""
    return StepPlacement(tuple(dispatch.assign(lengths, [0.0] * engines)), (), (), (-1,) * engines)


def by_rank(
    step: int, histories: Sequence[LengthHistory | None], engines: int, most: int, shares_of: Shares
) -> StepPlacement | None:
    """Step `step` (from 1) in at most `most` rank groups over `engines` engines; None without any history."""
    groups = rank_groups(histories, min(most, most_groups(engines)))
    if not groups:
        return None
    shares = tuple(shares_of(groups) or equal_shares(len(groups), engines, engines))
    engine_of = [0] * len(histories)
    rank_group_of = [-1] * engines
    for number, (group, places) in enumerate(zip(groups, engines_by_group(step, shares), strict=True)):
        medians = [history.median if (history := histories[prompt]) else None for prompt in group.prompts]
        for prompt, at in zip(group.prompts, dispatch.assign(medians, [0.0] * len(places)), strict=True):
            engine_of[prompt] = places[at]
        for engine in places:
            rank_group_of[engine] = number
    return StepPlacement(tuple(engine_of), groups, shares, tuple(rank_group_of))
