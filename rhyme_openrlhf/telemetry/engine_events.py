"""What an engine says of its part of a rollout stage, as events, for both generators: no decision, no state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rhyme_openrlhf.telemetry.events import DraftBudget, DraftGain, EngineInterval, EngineStep, Event, Note
from rhyme_openrlhf.telemetry.metrics import EngineCounters


def engine_events(
    step: int,
    engine: int,
    counters: EngineCounters,
    weight_version: int,
    decisions: Mapping[str, Any],
    gain: Mapping[str, Any],
    problems: Sequence[str],
) -> list[Event]:
    """What an engine did in a step. `decisions`, `gain`: fields of DraftBudget and DraftGain, empty where there is
    nothing to tell; `problems`: sentences."""
    events: list[Event] = [EngineStep(step, engine, counters, weight_version)]
    if decisions.get("running"):
        events.append(DraftBudget(step, engine, **decisions))
    if gain:
        events.append(DraftGain(step, engine, **gain))
    return [*events, *(Note("warning", f"engine {engine}: {problem}") for problem in problems)]


def interval_events(step: int, engine: int, timeline: Iterable[Any]) -> list[Event]:
    """An engine's states in the rollout stage of a step."""
    return [
        EngineInterval(engine, one.state, one.start, one.end, step, one.weight_version, one.cause) for one in timeline
    ]
