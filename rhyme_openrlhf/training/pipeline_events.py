"""What the pipeline's controller records of its engines and steps, as events: no decision, no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhyme_openrlhf.rollout.pipeline_engine import TurnReport
from rhyme_openrlhf.telemetry.events import (
    DraftBudget,
    DraftGain,
    EngineInterval,
    EngineStep,
    Event,
    Note,
)


def turn_events(step: int, engine: int, report: TurnReport) -> list[Event]:
    """What an engine did in its turn of a step."""
    events: list[Event] = [EngineStep(step, engine, report.counters, report.weight_version)]
    if report.decisions.get("running"):
        events.append(DraftBudget(step, engine, **report.decisions))
    if report.gain:
        events.append(DraftGain(step, engine, **report.gain))
    return [*events, *(Note("warning", f"engine {engine}: {problem}") for problem in report.problems)]


def interval_events(step: int, timelines: Sequence[Sequence[Any] | None]) -> list[Event]:
    """The engines' states in the rollout stage of a step; `timelines`: of each engine, None if it is gone."""
    return [
        EngineInterval(engine, one.state, one.start, one.end, step, one.weight_version, one.cause)
        for engine, timeline in enumerate(timelines)
        for one in timeline or ()
    ]
