"""What engines tell becomes events; what they have nothing to tell of becomes none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace as NS
from typing import Any

from rhyme_openrlhf.telemetry.engine_events import engine_events, interval_events
from rhyme_openrlhf.telemetry.events import DraftBudget, DraftGain, EngineInterval, EngineStep, Note
from rhyme_openrlhf.telemetry.metrics import EngineCounters

COUNTERS = EngineCounters(response_tokens=3)


def fields_of(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init and field.name not in ("step", "engine")]


# Of no decode step.
DECISIONS: dict[str, Any] = {name: [] for name in fields_of(DraftBudget)}
GAIN = dict.fromkeys(fields_of(DraftGain), 1.0)


def test_an_engine_without_drafts_tells_of_its_step_alone() -> None:
    assert engine_events(4, 1, COUNTERS, 3, DECISIONS, {}, []) == [EngineStep(4, 1, COUNTERS, 3)]


def test_decisions_gain_and_problems_are_told() -> None:
    decisions = DECISIONS | {"running": [2]}
    step, budget, gain, problem = engine_events(4, 1, COUNTERS, 3, decisions, GAIN, ["slow"])
    assert step == EngineStep(4, 1, COUNTERS, 3)
    assert isinstance(budget, DraftBudget) and (budget.step, budget.engine, budget.running) == (4, 1, [2])
    assert isinstance(gain, DraftGain) and (gain.step, gain.engine) == (4, 1)
    assert problem == Note("warning", "engine 1: slow")


def test_every_state_of_a_timeline_is_an_interval_of_the_step() -> None:
    timeline = [
        NS(state="generate", start=1.0, end=2.0, weight_version=3, cause=""),
        NS(state="idle", start=2.0, end=2.5, weight_version=3, cause="tail"),
    ]
    assert interval_events(4, 1, timeline) == [
        EngineInterval(1, "generate", 1.0, 2.0, 4, 3, ""),
        EngineInterval(1, "idle", 2.0, 2.5, 4, 3, "tail"),
    ]
