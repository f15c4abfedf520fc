"""Engines' answers as events, for both samples generators. Pure.

Once a second an engine answers with its counters, and at the end of its part of a rollout stage with all that it did.
Invariant: an engine's samples add up to what it did since the rollout stage began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rhyme_openrlhf.telemetry.events import (
    DraftBudget,
    DraftGain,
    EngineInterval,
    EngineSample,
    EngineStep,
    Event,
    Note,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters

# Beside the counters in an engine's answer: the samples that run now.
RUNNING = "running"
# And the share of its KV cache in use (0 to 1); an engine that cannot tell leaves it out.
KV_CACHE = "kv_cache"
# And prompt key and response tokens of its unfinished sample with the most; None where none runs.
SLOWEST = "slowest"
Answer = Mapping[str, Any]


def slowest_sample(answers: Sequence[Answer | None]) -> tuple[str, int | None, int]:
    """Return prompt key, engine and response tokens of the longest unfinished sample; engine None without any."""
    found = [(*answer[SLOWEST], engine) for engine, answer in enumerate(answers) if answer and answer.get(SLOWEST)]
    prompt, tokens, engine = max(found, key=lambda one: one[1], default=("", 0, None))
    return prompt, engine, tokens


class EngineSampler:
    """The engines of one rollout stage, which began at `started` (seconds of any clock), or of several: `step` is the
    one that samples are of."""

    def __init__(self, step: int, engines: int, started: float) -> None:
        self.step = step
        self._before = [EngineCounters()] * engines
        self._at = started

    def samples(self, answers: Sequence[Answer | None], now: float) -> list[EngineSample]:
        """Return one sample of each engine, from its answer at `now`, on the clock of `started`; None: it is gone."""
        seconds, self._at = now - self._at, now
        found = []
        for engine, answer in enumerate(answers):
            if answer is None:
                continue
            counters = EngineCounters.from_dict(answer)
            since, self._before[engine] = counters - self._before[engine], counters
            found.append(
                EngineSample(
                    self.step,
                    engine,
                    int(answer[RUNNING]),
                    seconds,
                    since.response_tokens,
                    since.drafted,
                    since.accepted,
                    answer.get(KV_CACHE),
                )
            )
        return found


def engine_events(
    step: int,
    engine: int,
    counters: EngineCounters,
    weight_version: int,
    decisions: Mapping[str, Any],
    gain: Mapping[str, Any],
    problems: Sequence[str],
) -> list[Event]:
    """Return what an engine did in a step.

    `decisions`, `gain`: fields of DraftBudget and DraftGain, empty where there is nothing to tell; `problems`:
    sentences.
    """
    events: list[Event] = [EngineStep(step, engine, counters, weight_version)]
    if decisions.get("running"):
        events.append(DraftBudget(step, engine, **decisions))
    if gain:
        events.append(DraftGain(step, engine, **gain))
    return [*events, *(Note("warning", f"engine {engine}: {problem}") for problem in problems)]


def interval_events(step: int, engine: int, timeline: Iterable[Any]) -> list[Event]:
    """Return an engine's states in the rollout stage of a step."""
    return [
        EngineInterval(engine, one.state, one.start, one.end, step, one.weight_version, one.cause) for one in timeline
    ]
