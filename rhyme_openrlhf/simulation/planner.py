"""Gives a step's prompts to the engines, by asking the policies of `scheduling/` with what the run knows by then.

There is no decision here: what is known (last rollouts, step times, the trainer's last time) is put into the policies'
words, and their answers into jobs.

Invariant: every sample of a step becomes one job of one engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.scheduling import outliers
from rhyme_openrlhf.scheduling.first_layouts import FirstLayouts
from rhyme_openrlhf.scheduling.length_prior import LengthPrior
from rhyme_openrlhf.scheduling.rank_groups import RankGroup, historical_length
from rhyme_openrlhf.scheduling.step_plan import (
    Speculation,
    StepPlacement,
    by_predicted_work,
    most_rank_groups,
    placed,
    second_tier,
)
from rhyme_openrlhf.simulation.engine import Job
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.speculation import Rates
from rhyme_openrlhf.simulation.workload import PromptLoad, StepLoad


@dataclass(frozen=True)
class StepPlan:
    """`jobs`: of each engine; `rank_groups`: empty when dispatched by load; `rank_group_of`: of each engine, or -1.

    `group_of`: the rank group of each prompt. `samples` of each rank group, and those of them that have neither ended
    nor been deferred: `unfinished`, which falls while the step is generated. `fastest`: the most tokens that any of its
    samples ever makes in a decode step.
    """

    jobs: tuple[tuple[Job, ...], ...]
    rank_groups: tuple[RankGroup, ...]
    rank_group_of: tuple[int, ...]
    group_of: dict[int, int]
    samples: tuple[int, ...]
    unfinished: list[int]
    fastest: float


class History:
    """Lengths of each prompt's last rollout, how they grew, and what to expect of prompts never seen.

    `defers`: as `LengthPrior` takes it.
    """

    def __init__(self, defers: bool = False) -> None:
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._columns: dict[int, NDArray[np.int64]] = {}
        self.growth = outliers.Growth()
        self.prior = LengthPrior(defers)

    def lengths(self, prompt: int) -> tuple[int, ...]:
        """Return the lengths of the prompt's last responses; none if it was never seen."""
        return self._lengths.get(prompt, ())

    def column(self, prompt: int) -> NDArray[np.int64]:
        """Return `lengths` as an array, made once, because hundreds of decisions of a step ask for it."""
        known = self._columns.get(prompt)
        if known is None:
            known = self._columns[prompt] = np.array(self.lengths(prompt), dtype=np.int64)
        return known

    def note(self, number: int, step: StepLoad, load: PromptLoad) -> None:
        """Note that all responses to a prompt of step `number` are done."""
        before = historical_length(self.lengths(load.prompt))
        self.prior.ended(number, len(step.prompts), load.data_set, load.lengths)
        self.growth.note(step.epoch, load.prompt, before, statistics.median(load.lengths))
        self._lengths[load.prompt] = load.lengths
        self._columns.pop(load.prompt, None)


def plan(
    number: int,
    step: StepLoad,
    engines: int,
    history: History,
    features: Features,
    rates: Rates,
    verified: Speculation,
    predictor: Predictor,
    most_running: int,
    training_seconds: float,
    first: FirstLayouts | None = None,
) -> StepPlan:
    """Return the jobs of step `number` (from 1) for each of `engines` engines.

    `rates`: of whole drafts; `verified`: the part of them that is expected to be verified, and its gain; `first`: the
    layouts that nodes begin with. The n-th engine of a node stands for the n-th one of its first layout.
    """

    def shares_of(groups: Sequence[RankGroup]) -> Sequence[int] | None:
        if not features.two_tier:
            return None
        samples = sum(len(load.lengths) for load in step.prompts)
        prompt_tokens = statistics.fmean(load.prompt_tokens for load in step.prompts)
        return second_tier(groups, engines, samples, prompt_tokens, most_running, predictor, verified, training_seconds)

    pipeline = features.trainer == "pipeline"
    most = most_rank_groups(features.rank_groups, engines) if pipeline else 1
    known = [historical_length(history.lengths(load.prompt)) for load in step.prompts]
    expected = history.prior.expected(known, [load.data_set for load in step.prompts])
    placement = placed(number, expected, engines, most, shares_of)
    chosen: Sequence[int] | None = [load.engine for load in step.prompts] if features.as_placed else None
    if chosen and not 0 <= min(chosen) <= max(chosen) < engines:
        chosen = None
    if first is not None:
        each = engines // len(first.layouts)
        chosen = [node * each + engine for node, engine in first.engine_of]
    elif chosen is None and features.dispatch and not pipeline:
        lengths = [history.lengths(load.prompt) for load in step.prompts]
        chosen = by_predicted_work(lengths, [0] * engines, len(step.prompts[0].lengths))
    if chosen is not None:
        placement = StepPlacement(tuple(chosen), (), (), (-1,) * engines)
    jobs = _jobs(number, step, placement.engine_of, engines, rates, features.speculation == "measured")
    groups = placement.rank_groups
    samples = tuple(sum(len(step.prompts[place].lengths) for place in group.prompts) for group in groups)
    group_of = {step.prompts[place].prompt: rank for rank, group in enumerate(groups) for place in group.prompts}
    fastest = max(pace for part in jobs for job in part for pace in (job.tokens_per_step, *(p[1] for p in job.later)))
    return StepPlan(jobs, groups, placement.rank_group_of, group_of, samples, list(samples), fastest)


def _jobs(
    number: int, step: StepLoad, chosen: Sequence[int], engines: int, rates: Rates, recorded: bool
) -> tuple[tuple[Job, ...], ...]:
    """`recorded`: samples whose own drafts are known draft as these did."""
    jobs: list[list[Job]] = [[] for _ in range(engines)]
    sample = number << 32  # no sample of any step has another's number
    for load, engine in zip(step.prompts, chosen, strict=True):
        for place, length in enumerate(load.lengths):
            own = load.drafting[place] if recorded and load.drafting else ()
            first, later = (own[0], own[1:]) if own else ((0.0, rates.tokens_per_step, rates.drafts_per_step), ())
            jobs[engine].append(Job(sample, load.prompt, load.prompt_tokens, length, first[1], first[2], later=later))
            sample += 1
    return tuple(tuple(part) for part in jobs)
