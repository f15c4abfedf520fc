"""What the pipeline's controller records of its engines and steps, as events: no decision, no state."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from rhyme_openrlhf.engine.calls import TurnCalls
from rhyme_openrlhf.engine.messages import TurnReport
from rhyme_openrlhf.telemetry.engine_events import engine_events, interval_events
from rhyme_openrlhf.telemetry.events import Event

# An engine tells its timeline between two decode steps.
ENGINE_TIMEOUT_SECONDS = 120.0


def turn_events(step: int, engine: int, report: TurnReport) -> list[Event]:
    """What an engine did in its turn of a step."""
    return engine_events(
        step, engine, report.counters, report.weight_version, report.decisions, report.gain, report.problems
    )


def stage_intervals(engines: Sequence[TurnCalls], step: int, began: float, ended: float) -> list[Event]:
    """The engines' states in the rollout stage of a step, from `began` to `ended`; none of an engine that is gone."""
    events: list[Event] = []
    for number, answer in enumerate([engine.stage_intervals.remote(began, ended) for engine in engines]):
        try:
            timeline = ray.get(answer, timeout=ENGINE_TIMEOUT_SECONDS)
        except ray.exceptions.RayActorError:
            # Whoever is owed something by it makes up for that; its last moments are not recorded.
            continue
        events += interval_events(step, number, timeline or ())
    return events
