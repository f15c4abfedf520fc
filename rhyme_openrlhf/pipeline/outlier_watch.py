"""Watch for responses that are far too long for their rank group, some times a second (RhymeRL 6.3).

Thin: it queries the engines for their running samples; `scheduling/outliers.py` decides which are too long and where
they go. Each look takes the answers to the queries of earlier looks, so the controller never waits for an engine that
loads weights.

Invariants: a look never blocks; an engine has at most one query under way; an engine without an answer is left out of
the look. A rank group is judged only when all of its prompts have begun. A sample goes only to an engine with the same
weights; a sample on a tail layout stays there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray

from rhyme_openrlhf.engine.calls import TurnCalls
from rhyme_openrlhf.engine.messages import RunningSamples
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.scheduling.outliers import RunningEngine, RunningEngines, destination, look_seconds, outliers


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
        self._asked: dict[ray.ObjectRef[RunningSamples], int] = {}
        self.look_seconds = look_seconds(len(engines))
        """From one look to the next."""

    def find(self, step: Step) -> list[Outlier]:
        """Return the outliers, the longest of each rank group first; nothing before the next look is due."""
        if not step.placement.rank_groups or time.monotonic() - self._looked < self.look_seconds:
            return []
        self._looked = time.monotonic()
        answers = self._answers()
        waiting = set(self._asked.values())
        for number, engine in enumerate(self._engines):
            if number not in waiting:
                self._asked[engine.running_samples.remote()] = number
        return too_long(step, answers, self._samples, self._beta())

    def _answers(self) -> list[RunningSamples | None]:
        """Return each engine's answer to its last query, None where there is none yet or the engine is gone."""
        answers: list[RunningSamples | None] = [None] * len(self._engines)
        asked = list(self._asked)
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=0) if asked else ([], [])
        for ref in ready:
            number = self._asked.pop(ref)
            with contextlib.suppress(ray.exceptions.RayError):
                answers[number] = ray.get(ref)
        return answers


def too_long(
    step: Step, answers: Sequence[RunningSamples | None], samples_per_prompt: int, factor: float
) -> list[Outlier]:
    """Return the outliers of the step, as `OutlierWatch.find`; `answers`: of each engine, None without one."""
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
