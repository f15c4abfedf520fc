"""The engine of each prompt of a step: by tiers 1 and 2 together (RhymeRL 6.2 and 6.4), or by predicted work.

With history a step has rank groups by the last responses' lengths. Each has as many engines as equal shares or
`plan_shares` give it, by the time that `GroupTime` predicts. Inside a rank group, and without rank groups, each next
prompt goes to the engine with the least predicted work, longest prompts first. Predicted work is in tokens, with the
prompt's samples as long as last time; rank groups also take what `length_prior.py` expects of a prompt never seen.
Without any history all prompts count the same, which is OpenRLHF's own order.

Invariants:
- Each prompt has one engine; a rank group's prompts are only on its engines.
- With equal work the numbers of prompts on the engines differ by at most one.
- If no engine had work before, none ends with more than 4/3 of the work on the fullest engine of the best distribution
  (Graham 1969).
- More engines never take longer for a rank group, if a decode step of more samples does not take less.
- The same input gives the same plan.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.latency.predictor import Predictor, StepSeconds
from rhyme_openrlhf.scheduling.engine_shares import equal_shares, plan_shares
from rhyme_openrlhf.scheduling.length_prior import Expected
from rhyme_openrlhf.scheduling.rank_groups import RankGroup, engines_by_group, rank_groups


def by_predicted_work(lengths: Sequence[Sequence[int]], unfinished: Sequence[int], samples: int) -> list[int] | None:
    """Return the engine of each prompt, which is answered `samples` times; None without any history.

    `lengths`: response lengths of each prompt's last rollout (none: never seen); `unfinished`: samples that each engine
    still has, which count as samples of the mean length.
    """
    means = [statistics.fmean(of_prompt) if of_prompt else None for of_prompt in lengths]
    known = [mean for mean in means if mean is not None]
    if not known:
        return None
    each = statistics.fmean(known)
    return assign([None if mean is None else samples * mean for mean in means], [count * each for count in unfinished])


def assign(lengths: Sequence[float | None], loads: Sequence[float]) -> list[int]:
    """Return the engine (place in `loads`) of each prompt.

    `lengths`: predicted tokens of a prompt, None if never seen (counts as the median of the others); `loads`: predicted
    tokens each engine still has to generate. Raises ValueError without engines.
    """
    if not loads:
        raise ValueError("there is no engine to send prompts to")
    known = [length for length in lengths if length is not None]
    middle = statistics.median(known) if known else 1.0
    work = [middle if length is None else float(length) for length in lengths]
    # The number of prompts given decides between equal loads, then the engine's place.
    heap = [(float(load), 0, engine) for engine, load in enumerate(loads)]
    heapq.heapify(heap)
    chosen = [0] * len(work)
    for prompt in sorted(range(len(work)), key=lambda place: -work[place]):
        load, count, engine = heap[0]
        chosen[prompt] = engine
        heapq.heapreplace(heap, (load + work[prompt], count + 1, engine))
    return chosen


@dataclass(frozen=True)
class Speculation:
    """The present speculation: response tokens and draft tokens, per sample and decode step."""

    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0


@dataclass(frozen=True)
class GroupTime:
    """tau of the rank groups of one step. Call it with (mean length, engines); seconds.

    `samples`: of a rank group, over all its engines; `prompt_tokens`: of a prompt, in the mean; `most_running`: samples
    that an engine runs at once.
    """

    step_seconds: StepSeconds
    samples: int
    prompt_tokens: float
    most_running: int
    speculation: Speculation = Speculation()

    def __call__(self, mean_length: float, engines: int) -> float:
        each = math.ceil(self.samples / engines)
        running = min(each, self.most_running)
        # Step times are nearly linear in the context: the middle of the response stands for all of it.
        context = round(running * (self.prompt_tokens + mean_length / 2))
        drafts = round(running * self.speculation.drafts_per_step)
        steps = mean_length / self.speculation.tokens_per_step * each / running
        return steps * self.step_seconds(running, context, drafts)


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
    """Return the default number of rank groups: half as many as engines, from 2 to MOST_RANK_GROUPS.

    With one engine for each rank group, the second tier cannot act, and the longest rank group's engine decides.
    """
    return min(MOST_RANK_GROUPS, max(2, engines // 2))


def most_rank_groups(asked: int, engines: int) -> int:
    """Return how many rank groups a step has at most, of `asked` ones (0: the usual number); below 2 it has none."""
    return (asked or usual_rank_groups(engines)) if engines > 1 else 1


def placed(step: int, expected: Expected, engines: int, most: int, shares_of: Shares) -> StepPlacement:
    """Return step `step` (from 1) in at most `most` rank groups; by load where there are none, or without history."""
    lengths, limits = expected
    placement = by_rank(step, lengths, engines, most, shares_of, limits) if most > 1 else None
    return placement or by_load([None] * len(lengths), engines)


def no_second_tier(groups: int, engines: int) -> str:
    """Return why the second tier cannot act on this many rank groups and engines, "" if it can."""
    if groups < engines:
        return ""
    return (
        f"two-tier scheduling has no effect: each of {groups} rank groups has one of {engines} engines; "
        f"set the number of rank groups to at most {max(engines // 2, 1)}"
    )


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
    """Return how many of the engines each rank group gets (RhymeRL 6.4); None if `no_second_tier` says why not.

    `samples`: of the whole step; the rest as `GroupTime` and `plan_shares` take it.
    """
    if no_second_tier(len(groups), engines):
        return None
    each = round(samples / len(groups))
    time_of = GroupTime(predictor.step_seconds, each, prompt_tokens, most_running, speculation)
    return plan_shares([group.mean_length for group in groups], engines, time_of, training_seconds).engines


def by_load(lengths: Sequence[float | None], engines: int) -> StepPlacement:
    """Give each next prompt to the engine with the least predicted work; all count the same if every length is None."""
    return StepPlacement(tuple(assign(lengths, [0.0] * engines)), (), (), (-1,) * engines)


def by_rank(
    step: int,
    lengths: Sequence[float | None],
    engines: int,
    most: int,
    shares_of: Shares,
    limits: Sequence[float | None] = (),
) -> StepPlacement | None:
    """Step `step` (from 1) in at most `most` rank groups over `engines` engines; None without any history."""
    groups = rank_groups(lengths, min(most, engines), limits)
    if not groups:
        return None
    shares = tuple(shares_of(groups) or equal_shares(len(groups), engines))
    engine_of = [0] * len(lengths)
    rank_group_of = [-1] * engines
    for number, (group, places) in enumerate(zip(groups, engines_by_group(step, shares), strict=True)):
        own = [lengths[prompt] for prompt in group.prompts]
        for prompt, at in zip(group.prompts, assign(own, [0.0] * len(places)), strict=True):
            engine_of[prompt] = places[at]
        for engine in places:
            rank_group_of[engine] = number
    return StepPlacement(tuple(engine_of), groups, shares, tuple(rank_group_of))
