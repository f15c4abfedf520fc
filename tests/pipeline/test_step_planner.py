"""The step planner uses what the run knows; missing knowledge costs the plan, never the step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

import ray

from rhyme_openrlhf.pipeline import step_planner
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.pipeline.step_planner import StepPlanner, rank_groups_event
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.simulation.engine_kinds import load
from rhyme_openrlhf.telemetry.events import Note, RankGroups
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.training.samples_generator import GeneratorState

# Sixteen prompts of ever longer responses.
LENGTHS = [(2**n, 2**n) for n in range(3, 11) for _ in range(2)]
STEP = Step(3, 2, [f"prompt {n}" for n in range(16)], [], [], {}, GeneratorState(3))


def a_planner(
    monkeypatch: pytest.MonkeyPatch, lengths: Any, profiled: bool = True, switches: bool = False, **settings: Any
) -> tuple[StepPlanner, list[Any]]:
    recorded: list[Any] = []
    services: Any = NS(
        settings=RhymeSettings(histopipe=HistoPipeSettings(**settings), tp_switch=TpSwitchSettings(enable=switches)),
        history_workers=[],
        record=lambda event, source: recorded.append(event),
    )
    monkeypatch.setattr(step_planner, "last_lengths", lengths)
    profile = load(["pat-a40"])[2] if profiled else None
    planner = StepPlanner(services, 8, profile, 256)
    planner.observe(EngineCounters(decode_tokens=20, sample_steps=10), 60.0)
    return planner, recorded


def test_long_rank_groups_get_more_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, recorded = a_planner(monkeypatch, lambda *_: LENGTHS)
    placement = planner.place(STEP, 8)
    assert len(placement.rank_groups) == 4 and sum(placement.shares) == 8
    assert placement.shares[0] < placement.shares[-1] and recorded == []
    equal, _ = a_planner(monkeypatch, lambda *_: LENGTHS, two_tier=False)
    assert equal.place(STEP, 8).shares == (2, 2, 2, 2)


def test_the_run_says_when_there_are_as_many_rank_groups_as_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, recorded = a_planner(monkeypatch, lambda *_: LENGTHS, rank_groups=8)
    assert [planner.place(STEP, 8).shares for _ in range(2)] == [(1,) * 8] * 2
    (note,) = recorded
    assert "no effect" in note.text and "at most 4" in note.text and "--histopipe.rank_groups" in note.text


def test_the_usual_rank_groups_of_two_engines_need_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, recorded = a_planner(monkeypatch, lambda *_: LENGTHS)
    assert planner.place(STEP, 2).shares == (1, 1) and recorded == []


def test_without_a_profile_all_have_as_many_and_the_run_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, recorded = a_planner(monkeypatch, lambda *_: LENGTHS, profiled=False)
    assert [planner.place(STEP, 8).shares for _ in range(2)] == [(2, 2, 2, 2)] * 2
    (note,) = recorded
    assert isinstance(note, Note) and "profile" in note.text


def test_a_history_worker_that_is_gone_costs_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: Any, keys: list[str], __: float, missed: Any) -> Any:
        missed(ray.exceptions.RayActorError())
        return [()] * len(keys)

    planner, recorded = a_planner(monkeypatch, gone)
    assert planner.place(STEP, 2).engine_of == (0, 1) * 8
    assert isinstance(recorded[0], Note) and "history worker" in recorded[0].text


@pytest.mark.parametrize(("engines", "settings"), [(1, {}), (4, {"rank_groups": 1})])
def test_nobody_is_asked_where_there_is_nothing_to_rank(
    monkeypatch: pytest.MonkeyPatch, engines: int, settings: dict[str, int]
) -> None:
    planner, _ = a_planner(monkeypatch, None, **settings)
    assert planner.place(STEP, engines).rank_groups == ()


def test_lengths_of_what_has_ended_are_known_before_the_history_workers_hear_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner, _ = a_planner(monkeypatch, lambda _, keys, *__: [()] * len(keys))
    assert planner.place(STEP, 2).rank_groups == ()
    before = dataclasses.replace(STEP, number=1)
    for place in range(15):
        planner.ended(before, place, [150 - 10 * place, 150 - 10 * place])
    short, long = planner.place(STEP, 2).rank_groups
    # The one that is not known stands in the middle.
    assert sorted(short.prompts) == [*range(8, 15), 15] or sorted(short.prompts) == list(range(7, 15))
    assert {0, 1, 2, 3, 4, 5, 6} <= set(long.prompts)
    # Three steps later they are the history workers' alone.
    planner.ended(dataclasses.replace(STEP, number=4), 0, [5])
    assert planner.place(STEP, 2).rank_groups[0].prompts[0] == 0


def test_prompts_never_answered_are_ranked_by_their_data_sets_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, _ = a_planner(monkeypatch, lambda _, keys, *__: [()] * len(keys), enable=True, defer=True)
    data_sets = ["math", "chat"] * 8
    before = dataclasses.replace(STEP, number=1, data_sets=data_sets)
    now = dataclasses.replace(STEP, prompts=[f"another {n}" for n in range(16)], data_sets=data_sets)
    for place in range(16):
        assert planner.place(now, 2).rank_groups == ()
        planner.ended(before, place, [300, 500] if place % 2 == 0 else [50, 50])
    chat, math = planner.place(now, 2).rank_groups
    assert chat.prompts == tuple(range(1, 16, 2)) and math.prompts == tuple(range(0, 16, 2))
    assert (chat.mean_length, chat.longest, math.mean_length, math.longest) == (50, 50, 400, 500)
    # A prompt with a history of its own has that.
    planner.ended(dataclasses.replace(now, number=2), 0, [5, 5])
    assert planner.place(now, 2).rank_groups[0].prompts[0] == 0


def test_beta_follows_how_much_responses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, _ = a_planner(monkeypatch, lambda *_: LENGTHS)
    assert planner.beta() == 1.1
    planner.place(STEP, 2)
    for place in range(8):
        planner.ended(STEP, place, [LENGTHS[place][0] * (1 if place < 4 else 2)])
    # Of eight, the upper half has doubled.
    assert planner.beta() == 2.0
    planner.ended(dataclasses.replace(STEP, epoch=4), 0, [1])
    assert planner.beta() == 1.1


def test_what_became_of_rank_groups_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, _ = a_planner(monkeypatch, lambda *_: LENGTHS)
    placement = planner.place(STEP, 2)
    event = rank_groups_event(3, placement, {place: (place, place + 2) for place in range(16)})
    assert event == RankGroups(3, [8, 8], [1, 1], [30.0, 480.0], [4.5, 12.5])
    # What is deferred has no length yet.
    assert rank_groups_event(3, placement, {0: (6,), 15: (8,)}) == RankGroups(3, [8, 8], [1, 1], [30.0, 480.0], [6, 8])
    assert rank_groups_event(3, placement, {0: (6,)}) is None


def test_a_switch_of_layouts_is_told_lengths_also_without_rank_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, _ = a_planner(monkeypatch, lambda *_: LENGTHS, rank_groups=1)
    planner.place(STEP, 8)
    assert planner.last_lengths() == {}
    asked, _ = a_planner(monkeypatch, lambda *_: LENGTHS, rank_groups=1, switches=True)
    for number in (3, 4, 5):
        asked.place(dataclasses.replace(STEP, number=number, prompts=[f"{number}, {n}" for n in range(16)]), 8)
    # Of the two steps that engines have.
    assert asked.last_lengths() == {prompt_key(f"{step}, {n}"): LENGTHS[n] for step in (4, 5) for n in range(16)}
