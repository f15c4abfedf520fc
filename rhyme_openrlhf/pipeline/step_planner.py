"""Asks the policies of `scheduling/` where the prompts of a step go, with what the run knows.

Thin: which lengths are known, what a profile says and how long training took are put into the policies' words; there is
no decision here. Invariant: a history worker that does not answer costs its prompts' ranks, and a run without a profile
the plan (a Note says so once), never the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rhyme_openrlhf.history.workers import last_lengths
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.scheduling.length_prior import LengthPrior
from rhyme_openrlhf.scheduling.outliers import Growth
from rhyme_openrlhf.scheduling.rank_groups import RankGroup, historical_length
from rhyme_openrlhf.scheduling.step_plan import (
    Speculation,
    StepPlacement,
    most_rank_groups,
    no_second_tier,
    placed,
    second_tier,
)
from rhyme_openrlhf.telemetry.events import Note, RankGroups
from rhyme_openrlhf.telemetry.metrics import EngineCounters, tokens_per_step
from rhyme_openrlhf.telemetry.services import RunServices

SOURCE = "rollout"
# Steps whose lengths are kept here. A step is planned when the step two before it has ended. The history workers hear
# of that one when it is trained on, which is later than the plan.
KEPT_STEPS = 3
# The step that is being completed and the next.
STEPS_WITH_ENGINES = 2


class StepPlanner:
    """Plans the steps of one run. `most_running`: samples that an engine runs at once."""

    def __init__(
        self, services: RunServices, samples_per_prompt: int, profile: Profile | None, most_running: int
    ) -> None:
        self._services = services
        self._settings = services.settings.histopipe
        self._engines = 0
        self._samples = samples_per_prompt
        self._predictor = None if profile is None else Predictor(StepModel(profile))
        self._most_running = most_running
        self._speculation = Speculation()
        self._prompt_tokens = 0.0
        self._training_seconds = 0.0
        self._told = False
        # By step and prompt: lengths of what has ended, and the median that was known before.
        self._ended: dict[int, dict[str, list[int]]] = {}
        self._known: dict[int, dict[str, float]] = {}
        self._growth = Growth()
        self._prior = LengthPrior(self._settings.defer)
        # By step and prompt: lengths of the last responses, as far as they were asked for.
        self._last: dict[int, dict[str, tuple[int, ...]]] = {}

    def observe(self, counters: EngineCounters, prompt_tokens: float) -> None:
        """Note what engines did in a step, and the mean length of its prompts."""
        self._prompt_tokens = prompt_tokens
        rate = tokens_per_step(counters)
        if rate is not None:
            self._speculation = Speculation(rate, counters.drafted / counters.sample_steps)

    def trained(self, seconds: float) -> None:
        """Note that the last training step took `seconds`."""
        self._training_seconds = seconds

    def ended(self, step: Step, place: int, lengths: list[int]) -> None:
        """Note that a prompt group of a step has ended, with responses of these lengths."""
        prompt = step.prompts[place]
        self._ended.setdefault(step.number, {})[prompt] = lengths
        self._prior.ended(step.number, len(step.prompts), _data_set(step, place), lengths)
        last = self._known.get(step.number, {}).get(prompt)
        self._growth.note(step.epoch, prompt, last, statistics.median(lengths))
        _forget(self._ended, step.number - KEPT_STEPS)
        _forget(self._known, step.number - KEPT_STEPS)

    def beta(self) -> float:
        """Return by which factor a response may exceed its rank group's longest historical length (RhymeRL 6.3)."""
        return self._growth.beta()

    def last_lengths(self) -> dict[str, Sequence[int]]:
        """Return how long the prompts (`prompt_key`) of the steps that engines have were answered before, where known.

        Empty where layouts are not switched, because nothing else asks.
        """
        return {prompt_key(prompt): of for lately in self._last.values() for prompt, of in lately.items() if of}

    def place(self, step: Step, engines: int) -> StepPlacement:
        """Return the engine of each of the step's prompts, of `engines` that are there."""
        self._engines = engines
        groups = most_rank_groups(self._settings.rank_groups, engines)
        histories: Sequence[float | None] = [None] * len(step.prompts)
        if groups > 1 or self._services.settings.tp_switch.enable:
            histories = self._histories(step)
        if groups > 1:
            known = zip(step.prompts, histories, strict=True)
            self._known[step.number] = {prompt: one for prompt, one in known if one is not None}
        data_sets = [_data_set(step, place) for place in range(len(step.prompts))]
        return placed(step.number, self._prior.expected(histories, data_sets), engines, groups, self._shares)

    def _histories(self, step: Step) -> list[float | None]:
        prompts, services = step.prompts, self._services
        lengths = last_lengths(
            services.history_workers,
            [prompt_key(prompt) for prompt in prompts],
            services.settings.history.fetch_timeout_s,
            lambda error: self._say_once(f"a history worker did not tell how long its prompts are answered: {error}"),
        )
        newer: dict[str, tuple[int, ...]] = {
            prompt: tuple(of) for _, lately in sorted(self._ended.items()) for prompt, of in lately.items()
        }
        lengths = [newer.get(prompt, known) for prompt, known in zip(prompts, lengths, strict=True)]
        if self._services.settings.tp_switch.enable:
            self._last[step.number] = dict(zip(prompts, lengths, strict=True))
            _forget(self._last, step.number - STEPS_WITH_ENGINES)
        return [historical_length(one) for one in lengths]

    def _shares(self, groups: Sequence[RankGroup]) -> Sequence[int] | None:
        if not self._settings.two_tier:
            return None
        if reason := no_second_tier(len(groups), self._engines):
            # The usual number leaves two engines no second tier: nothing that a user set has no effect then.
            if self._settings.rank_groups:
                self._say_once(f"{reason} (--histopipe.rank_groups)")
            return None
        if self._predictor is None:
            self._say_once("rank groups have equal numbers of engines, because the run has no profile of step times")
            return None
        return second_tier(
            groups,
            self._engines,
            sum(len(group.prompts) for group in groups) * self._samples,
            self._prompt_tokens,
            self._most_running,
            self._predictor,
            self._speculation,
            self._training_seconds,
        )

    def _say_once(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._services.record(Note("warning", text.splitlines()[0]), SOURCE)


def _data_set(step: Step, place: int) -> str:
    """Return the name of a prompt's data set, "" if it is not known."""
    return step.data_sets[place] if step.data_sets else ""


def _forget(by_step: dict[int, Any], oldest: int) -> None:
    """Drop the steps up to `oldest`."""
    for step in [step for step in by_step if step <= oldest]:
        del by_step[step]


def rank_groups_event(step: int, placement: StepPlacement, lengths: Mapping[int, Sequence[int]]) -> RankGroups | None:
    """Return what became of a step's rank groups; `lengths`: of each prompt's responses, as far as they have ended.

    None if it had none, or one of which nothing has ended.
    """
    if not all(lengths.keys() & set(group.prompts) for group in placement.rank_groups) or not placement.rank_groups:
        return None
    return RankGroups(
        step=step,
        prompts=[len(group.prompts) for group in placement.rank_groups],
        engines=list(placement.shares),
        predicted=[group.mean_length for group in placement.rank_groups],
        real=[
            statistics.fmean(length for prompt in group.prompts for length in lengths.get(prompt, ()))
            for group in placement.rank_groups
        ],
    )
