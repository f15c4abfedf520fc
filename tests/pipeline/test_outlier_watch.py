"""The outlier watch finds the prompt groups whose responses are far too long."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

import ray

from rhyme_openrlhf.engine.messages import RunningSamples
from rhyme_openrlhf.pipeline import outlier_watch
from rhyme_openrlhf.pipeline.outlier_watch import Outlier, OutlierWatch, too_long
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.scheduling.rank_groups import RankGroup
from rhyme_openrlhf.scheduling.step_plan import StepPlacement
from rhyme_openrlhf.scheduling.turns import training_turn
from rhyme_openrlhf.training.samples_generator import GeneratorState

TURN = training_turn(5, 0)


def a_step(done: set[int] = frozenset()) -> Step:  # type: ignore[assignment]
    """Ten short prompts on engine 0, ten long ones on engine 1."""
    groups = (RankGroup(tuple(range(10)), 10.0, 20.0), RankGroup(tuple(range(10, 20)), 100.0, 200.0))
    placement = StepPlacement((0,) * 10 + (1,) * 10, groups, (1, 1), (0, 1))
    engine_of = dict(enumerate(placement.engine_of))
    step = Step(5, 2, [str(n) for n in range(20)], [], [], {}, GeneratorState(5), engine_of=engine_of, done=set(done))
    step.turn, step.placement = TURN, placement
    return step


def running(turn: int, lengths: dict[int, list[int]], first: int = -1, version: int = 4) -> RunningSamples:
    """Samples that cannot move, or numbered from `first` on."""
    flat = [(place, tokens) for place, of in lengths.items() for tokens in of]
    numbers = [-1 if first < 0 else first + n for n in range(len(flat))]
    samples = [(turn, *one, number) for one, number in zip(flat, numbers, strict=True)]
    return RunningSamples(turn, samples, version, 0 if first < 0 else 1000)


def places(step: Step, answers: list[RunningSamples | None]) -> list[int]:
    return [one.place for one in too_long(step, answers, 2, 1.1)]


def test_the_last_of_a_rank_group_that_are_longer_than_ever_are_too_long() -> None:
    step = a_step(done=set(range(8)) | set(range(12, 20)))
    long = running(TURN.number, {10: [150, 199], 11: [30]})
    # Two of twenty samples are the last tenth.
    assert places(step, [running(TURN.number, {8: [23], 9: [25]}), long]) == [9, 8]
    assert places(step, [running(TURN.number, {8: [21], 9: [25]}), long]) == [9]
    assert places(step, [running(TURN.number, {8: [23, 24], 9: [25]}), long]) == []
    step.deferred.add(9)
    assert places(step, [running(TURN.number, {8: [23], 9: [25]}), long]) == [8]


def test_a_rank_group_is_judged_when_all_of_it_has_begun() -> None:
    step = a_step(done=set(range(9)) | set(range(11, 20)))
    there = running(TURN.number, {9: [50]})
    assert places(step, [there, RunningSamples(-1, [])]) == [9]
    assert places(step, [RunningSamples(TURN.number - 2, [(TURN.number - 2, 9, 50, -1)]), None]) == []
    # In the turn behind, an engine runs what was deferred and what has come late.
    behind = RunningSamples(TURN.number + 2, [(TURN.number, 9, 50, -1), (TURN.number + 2, 9, 50, -1)])
    assert places(step, [behind, None]) == [9]


def test_a_short_outlier_goes_to_a_longer_rank_groups_engine_that_still_generates_with_the_same_weights() -> None:
    step = a_step(done=set(range(9)) | set(range(11, 20)))
    short, long = running(TURN.number, {9: [50, 3]}, 5), running(TURN.number, {10: [30]}, 9)
    assert too_long(step, [short, long], 2, 1.1) == [Outlier(9, 0, 5, 50, 1)]
    # Newer weights there, nothing of the step there any more, or no home for samples: to the next step.
    for other in (running(TURN.number, {10: [30]}, 9, version=5), running(TURN.number, {}, 9)):
        assert too_long(step, [short, other], 2, 1.1) == [Outlier(9, 0, 5, 50, None)]
    assert too_long(step, [running(TURN.number, {9: [50]}), long], 2, 1.1) == [Outlier(9, 0, -1, 50, None)]
    # Of the longest rank group: to the next step.
    assert too_long(step, [short, running(TURN.number, {10: [300]}, 9)], 2, 1.1)[1] == Outlier(10, 1, 9, 300, None)


def test_what_a_tail_layout_has_stays_there_and_is_no_destination() -> None:
    step = a_step(done=set(range(9)) | set(range(11, 20)))
    nothing = running(TURN.number, {}, 5)
    tail = RunningSamples(-1, [(TURN.number, 9, 50, 9), (TURN.number, 10, 30, 10)], 4, 1000)
    assert too_long(step, [nothing, nothing, tail], 2, 1.1) == []
    short = running(TURN.number, {9: [50]}, 5)
    there = RunningSamples(-1, [(TURN.number, 10, 30, 9)], 4, 1000)
    assert too_long(step, [short, nothing, there], 2, 1.1) == [Outlier(9, 0, 5, 50, None)]


def test_an_engine_that_loads_weights_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine 1 never answers, engine 2 is gone: looks go on with engine 0, and query engine 1 once."""
    step = a_step(done=set(range(9)) | set(range(11, 20)))
    asked: list[int] = []

    def ask(engine: int) -> tuple[int, int]:
        asked.append(engine)
        return engine, len(asked)

    def wait(refs: list[Any], num_returns: int, timeout: float) -> Any:
        assert timeout == 0
        return [ref for ref in refs if ref[0] != 1], [ref for ref in refs if ref[0] == 1]

    def get(ref: tuple[int, int]) -> RunningSamples:
        if ref[0] == 2:
            raise ray.exceptions.RayActorError
        return running(TURN.number, {9: [50]})

    monkeypatch.setattr(outlier_watch, "ray", NS(wait=wait, get=get, exceptions=ray.exceptions))
    engines: Any = [NS(running_samples=NS(remote=lambda engine=engine: ask(engine))) for engine in range(3)]
    watch = OutlierWatch(engines, lambda: 1.1, 2)
    watch.look_seconds = 0.0
    assert watch.find(step) == []
    assert [one.place for one in watch.find(step)] == [9]
    assert [one.place for one in watch.find(step)] == [9]
    assert sorted(asked) == [0, 0, 0, 1, 2, 2, 2]


def test_a_look_that_is_not_due_asks_nobody() -> None:
    asked: list[int] = []
    engine: Any = NS(running_samples=NS(remote=lambda: asked.append(1)))
    watch = OutlierWatch([engine, engine], lambda: 1.1, 2)
    watch.look_seconds = 60.0
    assert watch.find(a_step()) == watch.find(a_step()) == [] and len(asked) == 2


def test_many_engines_are_asked_less_often() -> None:
    engine = NS(running_samples=NS(remote=lambda: None))
    few, many = (OutlierWatch([engine] * count, lambda: 1.1, 2) for count in (2, 1024))
    assert few.look_seconds < 0.5 and 2 < many.look_seconds < 10
