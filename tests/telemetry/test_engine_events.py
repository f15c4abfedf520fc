"""Engines' answers become events; empty answers become none."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry.engine_events import (
    RUNNING,
    SLOWEST,
    EngineSampler,
    engine_events,
    interval_events,
    slowest_sample,
)
from rhyme_openrlhf.telemetry.event_json import parse, to_json
from rhyme_openrlhf.telemetry.events import (
    DraftBudget,
    DraftGain,
    EngineInterval,
    EngineStep,
    Event,
    Note,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters

COUNTERS = EngineCounters(response_tokens=3)


def fields_of(kind: type[Event]) -> list[str]:
    return [name for name in kind.__struct_fields__ if name not in ("step", "engine")]


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


def test_the_slowest_sample_is_the_longest_of_all_engines() -> None:
    answers = [{SLOWEST: ("a", 7)}, {SLOWEST: None}, None, {SLOWEST: ["b", 9]}, {RUNNING: 2}]
    assert slowest_sample(answers) == ("b", 3, 9)
    assert slowest_sample([answers[1], None]) == ("", None, 0)


counts = st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 64))


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=10))
def test_samples_add_up(looks: list[tuple[tuple[int, int, int, int], ...]]) -> None:
    sampler = EngineSampler(7, 2, 100.0)
    totals = [EngineCounters(), EngineCounters()]
    found = []
    for number, look in enumerate(looks):
        answers = []
        for engine, (tokens, drafted, accepted, running) in enumerate(look):
            totals[engine] += EngineCounters(response_tokens=tokens, drafted=drafted, accepted=accepted)
            answers.append({**totals[engine].to_dict(), RUNNING: running})
        found.append(sampler.samples(answers, 101.5 + number))
    for look, samples in zip(looks, found, strict=True):
        for engine, ((tokens, drafted, accepted, running), sample) in enumerate(zip(look, samples, strict=True)):
            assert (sample.step, sample.engine, sample.running) == (7, engine, running)
            assert (sample.response_tokens, sample.drafted, sample.accepted) == (tokens, drafted, accepted)
            recorded = parse(to_json(sample, 1.0, "rollout", 0))
            assert recorded is not None and recorded.event == sample
    assert [samples[0].seconds for samples in found] == [1.5] + [1.0] * (len(looks) - 1)
