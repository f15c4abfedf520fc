"""Looks some times a second for responses that are far too long for their rank group (RhymeRL 6.3).

Thin: asks the engines what they run, and `scheduling/outliers.py` what of it is too long and where it goes.
Invariants: engines that do not answer cost a look, never the step. A rank group is judged only when all of its prompts
have begun. A sample goes only to an engine with the same weights; a sample that a tail layout has stays there.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray

from rhyme_openrlhf.engine.calls import TurnCalls
from rhyme_openrlhf.engine.messages import RunningSamples
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.scheduling.outliers import RunningEngine, RunningEngines, destination, outliers

# What is too long has to be found while it still runs: with a small model, 100 tokens take a third of a second. With
# many engines less often, because the controller spends about a millisecond on each engine that it asks.
LOOK_SECONDS = 0.25
LOOK_SECONDS_PER_ENGINE = 0.004
# Engines answer between two decode steps.
ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Outlier:
    """A running sample that is too long: of the prompt at `place`, `tokens` long, at `engine`.

    `sample`: its number where it can move, else -1. `destination`: the engine that it should go to in the same step;
    None: to the next step.
    """

    place: int
    engine: int
    sample: int
    tokens: int
    destination: int | None = None


class OutlierWatch:
    """The watch of one run. `beta()`: how much longer than ever before is too long."""

    def __init__(self, engines: Sequence[TurnCalls], beta: Callable[[], float], samples_per_prompt: int) -> None:
        self._engines = engines
        self._beta = beta
        self._samples = samples_per_prompt
        self._looked = 0.0
        self.look_seconds = max(LOOK_SECONDS, len(engines) * LOOK_SECONDS_PER_ENGINE)
        """From one look to the next."""

    def find(self, step: Step) -> list[Outlier]:
        """Return what should leave its rank group, the longest of each first; nothing before the next look is due."""
        if not step.placement.rank_groups or time.monotonic() - self._looked < self.look_seconds:
            return []
        self._looked = time.monotonic()
        try:
            answers = ray.get([engine.running_samples.remote() for engine in self._engines], timeout=ANSWER_SECONDS)
        except (ray.exceptions.RayError, TimeoutError):
            return []
        return too_long(step, answers, self._samples, self._beta())


def too_long(
    step: Step, answers: Sequence[RunningSamples | None], samples_per_prompt: int, factor: float
) -> list[Outlier]:
    """Return the outliers of the step, as `OutlierWatch.find`; `answers`: of each engine, None if it is gone."""
    number, engine_of = step.turn.number, step.engine_of
    owed = set(step.owed()) - step.deferred
    there = [
        Outlier(place, engine, sample, tokens)
        for engine, answer in enumerate(answers)
        if answer is not None
        for turn, place, tokens, sample in answer.samples
        if turn == number and place in owed
    ]
    rank_group_of = {
        engine_of[place]: rank for rank, group in enumerate(step.placement.rank_groups) for place in group.prompts
    }
    busy = Counter(one.engine for one in there)
    by_weights: dict[int, list[RunningEngine]] = defaultdict(list)
    for engine, answer in enumerate(answers):
        if answer is not None and engine in rank_group_of and busy[engine]:
            by_weights[answer.weight_version].append(
                RunningEngine(engine, rank_group_of[engine], busy[engine], answer.free_tokens)
            )
    engines = {version: RunningEngines(alike) for version, alike in by_weights.items()}
    found = []
    for rank, group in enumerate(step.placement.rank_groups):
        here = [answers[engine_of[place]] for place in group.prompts if place in owed]
        if any(engine is None or engine.turn < number for engine in here):
            continue
        places = set(group.prompts)
        running = dict(enumerate(one for one in there if one.place in places))
        lengths = {key: one.tokens for key, one in running.items()}
        for key in outliers(lengths, len(group.prompts) * samples_per_prompt, group.longest, factor):
            one = running[key]
            if one.engine not in rank_group_of:
                continue
            alike = engines[answers[one.engine].weight_version]  # type: ignore[union-attr]
            to = None if one.sample < 0 else destination(one.tokens, rank, alike, one.engine).engine
            found.append(Outlier(one.place, one.engine, one.sample, one.tokens, to))
    return found
