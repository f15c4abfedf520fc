"""Gives a step's prompts to the engines, by asking the policies of `scheduling/` with what the run knows by then.

There is no decision here: what is known (last rollouts, step times, the trainer's last time) is put into the policies'
words, and their answers into jobs.

Invariant: every sample of a step becomes one job of one engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.scheduling import dispatch, outliers
from rhyme_openrlhf.scheduling.engine_shares import equal_shares, most_groups, plan_shares
from rhyme_openrlhf.scheduling.group_time import GroupTime, Speculation
from rhyme_openrlhf.scheduling.rank_groups import LengthHistory, RankGroup, engines_by_group, rank_groups
from rhyme_openrlhf.simulation.engine import Job
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.speculation_rates import Rates
from rhyme_openrlhf.simulation.workload import PromptLoad, StepLoad


@dataclass(frozen=True)
class StepPlan:
    """`jobs`: of each engine; `rank_groups`: empty when dispatched by load; `rank_group_of`: of each engine, or -1."""

    jobs: tuple[tuple[Job, ...], ...]
    rank_groups: tuple[RankGroup, ...]
    rank_group_of: tuple[int, ...]


class History:
    """Lengths of each prompt's last rollout, and how they grew."""

    def __init__(self) -> None:
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._growth: dict[int, list[tuple[float, float]]] = {}

    def lengths(self, prompt: int) -> tuple[int, ...]:
        """Of the prompt's last responses; empty if never seen."""
        return self._lengths.get(prompt, ())

    def of(self, load: PromptLoad) -> LengthHistory | None:
        lengths = self._lengths.get(load.prompt)
        return LengthHistory(statistics.median(lengths), max(lengths)) if lengths else None

    def note(self, epoch: int, load: PromptLoad) -> None:
        """All of the prompt's responses are done."""
        before = self.of(load)
        if before:
            self._growth.setdefault(epoch, []).append((before.median, statistics.median(load.lengths)))
        self._lengths[load.prompt] = load.lengths

    def growth_factor(self, epoch: int, floor: float) -> float:
        """The outliers' factor in an epoch: by the growth seen in the epoch before."""
        return outliers.beta(self._growth.get(epoch - 1, ()), floor)


def plan(
    number: int,
    step: StepLoad,
    engines: int,
    history: History,
    features: Features,
    rates: Rates,
    predictor: Predictor,
    most_running: int,
    training_seconds: float,
) -> StepPlan:
    """The jobs of step `number` (from 1) for each of `engines` engines."""
    known = [history.of(load) for load in step.prompts]
    groups: tuple[RankGroup, ...] = ()
    if features.trainer == "pipeline":
        groups = rank_groups(known, min(features.rank_groups, most_groups(engines)))
    if not groups:
        # Upstream's order looks at no history.
        lengths = [h.median if h and features.dispatch else None for h in known]
        return StepPlan(
            _jobs(number, step, dispatch.assign(lengths, [0.0] * engines), engines, rates), (), (-1,) * engines
        )
    shares = _shares(step, groups, engines, features, rates, predictor, most_running, training_seconds)
    chosen = [0] * len(step.prompts)
    rank_group_of = [-1] * engines
    for place, (group, places) in enumerate(zip(groups, engines_by_group(number, shares), strict=True)):
        medians = [h.median if (h := known[prompt]) else None for prompt in group.prompts]
        for prompt, at in zip(group.prompts, dispatch.assign(medians, [0.0] * len(places)), strict=True):
            chosen[prompt] = places[at]
        for engine in places:
            rank_group_of[engine] = place
    return StepPlan(_jobs(number, step, chosen, engines, rates), groups, tuple(rank_group_of))


def _shares(
    step: StepLoad,
    groups: Sequence[RankGroup],
    engines: int,
    features: Features,
    rates: Rates,
    predictor: Predictor,
    most_running: int,
    training_seconds: float,
) -> tuple[int, ...]:
    if not features.two_tier:
        return equal_shares(len(groups), engines, engines)
    time_of = GroupTime(
        predictor.step_seconds,
        samples=round(sum(len(load.lengths) for load in step.prompts) / len(groups)),
        prompt_tokens=statistics.fmean(load.prompt_tokens for load in step.prompts),
        most_running=most_running,
        speculation=Speculation(rates.tokens_per_step, rates.drafts_per_step),
    )
    return plan_shares([group.mean_length for group in groups], engines, time_of, training_seconds).engines


def _jobs(
    number: int, step: StepLoad, chosen: Sequence[int], engines: int, rates: Rates
) -> tuple[tuple[Job, ...], ...]:
    jobs: list[list[Job]] = [[] for _ in range(engines)]
    sample = number << 32  # no sample of any step has another's number
    for load, engine in zip(step.prompts, chosen, strict=True):
        for length in load.lengths:
            jobs[engine].append(
                Job(sample, load.prompt, load.prompt_tokens, length, rates.tokens_per_step, rates.drafts_per_step)
            )
            sample += 1
    return tuple(tuple(part) for part in jobs)
