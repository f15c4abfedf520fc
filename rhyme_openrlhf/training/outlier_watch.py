"""Looks about once a second for responses that are far too long for their rank group (RhymeRL 6.3).

Thin: asks the engines what they run and `scheduling/outliers.py` what of it is too long. Invariants: engines that do
not answer cost a look, never the step; a rank group is judged only when all of its prompts have begun.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rhyme_openrlhf.rollout.pipeline_engine import RunningSamples
from rhyme_openrlhf.scheduling.outliers import outliers
from rhyme_openrlhf.training.step_in_flight import StepInFlight

LOOK_SECONDS = 1.0
# Engines answer between two decode steps.
ANSWER_SECONDS = 10.0


class OutlierWatch:
    """That of one run. `beta()`: how much longer than ever before is too long."""

    def __init__(self, engines: Sequence[Any], beta: Callable[[], float], samples_per_prompt: int) -> None:
        self._engines = engines
        self._beta = beta
        self._samples = samples_per_prompt
        self._looked = 0.0

    def find(self, step: StepInFlight) -> list[int]:
        """The places whose prompt groups have a response that is too long, the longest first; none before the next look
        is due."""
        if not step.placement.rank_groups or time.monotonic() - self._looked < LOOK_SECONDS:
            return []
        self._looked = time.monotonic()
        try:
            answers = ray.get([engine.running_samples.remote() for engine in self._engines], timeout=ANSWER_SECONDS)
        except (ray.exceptions.RayError, TimeoutError):
            return []
        return too_long(step, answers, self._samples, self._beta())


def too_long(
    step: StepInFlight, answers: Sequence[RunningSamples | None], samples_per_prompt: int, factor: float
) -> list[int]:
    """The places of the step whose prompt groups have an outlier; `answers`: of each engine, None if it is gone."""
    number, engine_of = step.handed.turn.number, step.handed.engine_of
    owed = set(step.owed()) - step.deferred
    lengths: dict[int, list[int]] = {place: [] for place in owed}
    for answer in filter(None, answers):
        for turn, place, tokens in answer.samples:
            if turn == number and place in owed:
                lengths[place].append(tokens)
    found: dict[int, None] = {}
    for group in step.placement.rank_groups:
        here = [place for place in group.prompts if place in owed]
        engines = [answers[engine_of[place]] for place in here]
        if any(engine is None or engine.turn < number for engine in engines):
            continue
        running = dict(enumerate(itertools.chain.from_iterable(((place, n) for n in lengths[place]) for place in here)))
        tokens = {sample: length for sample, (_, length) in running.items()}
        late = outliers(tokens, len(group.prompts) * samples_per_prompt, group.longest, factor)
        found |= dict.fromkeys(running[sample][0] for sample in late)
    return list(found)
