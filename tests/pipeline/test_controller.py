"""The controller on made-up engines: the trainer gets whole steps in order, each prompt once."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace as NS
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

import ray

from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.pipeline import controller as pipeline
from rhyme_openrlhf.pipeline.batch import EXCHANGED, Batches, PromptGroup, StepEnd
from rhyme_openrlhf.pipeline.controller import NoRewardError, PipelineWaitError
from rhyme_openrlhf.pipeline.outlier_watch import Outlier
from rhyme_openrlhf.telemetry.events import EngineStep, Note, RolloutFinished, RolloutStarted
from rhyme_openrlhf.training.samples_generator import GeneratorState
from rhyme_openrlhf.training.trainer_async import GENERATOR
from tests.examples import examples
from tests.pipeline.made_up import SAMPLES, a_pipeline, by_chance, drawn_steps


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(0, 3), st.integers(0, 1 << 16))
def test_whatever_is_deferred_every_prompt_trains_once_and_a_resume_knows_which(
    sizes: list[int], first: int, seed: int
) -> None:
    sent: list[Any] = []
    chance = random.Random(seed)
    found: list[int] = []

    def find(step: Any) -> list[Outlier]:
        return [Outlier(place, 0, -1, 99) for place in step.owed() if chance.random() < 0.4]

    with pytest.MonkeyPatch.context() as patch:
        by_chance(patch, seed)
        patch.setattr(pipeline, "OutlierWatch", lambda *_: NS(find=find, look_seconds=1.0))
        controller, _, _ = a_pipeline(sent.append, defer=True)
        steps = drawn_steps(sizes, first)
        controller.run(iter(steps))
    batches = Batches(first + 1, SAMPLES, late=EXCHANGED)
    everything: list[str] = []
    before: list[str] = []
    for item in sent:
        if isinstance(item, PromptGroup):
            batches.add(item)
            continue
        number = item.step - first - 1
        batch = [sample.prompt for sample in batches.complete(item.step, item.prompts)][::SAMPLES]
        everything += batch
        deferred = item.client_states[GENERATOR].deferred
        assert len(batch) == sizes[number] and len(deferred) == item.deferred
        found += [item.deferred]
        # The next step, as a resumed run would draw it: together with what was trained, all prompts so far.
        ahead = (
            [prompt for prompt in steps[number + 1].prompts if prompt not in batch] if number + 1 < len(steps) else []
        )
        for prompt, label, _ in deferred:
            assert label == f"label of {prompt}"
            ahead.append(prompt)
        drawn = [prompt for step in steps[: number + 2] for prompt in step.prompts]
        assert sorted([*everything, *ahead]) == sorted(drawn)
        before = ahead
    assert before == [] and found[-1] == 0
    assert sorted(everything) == sorted(prompt for step in steps for prompt in step.prompts)


def test_nothing_is_deferred_into_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 1)
    monkeypatch.setattr(
        pipeline,
        "OutlierWatch",
        lambda *_: NS(find=lambda step: [Outlier(place, 0, -1, 9) for place in step.owed()[:1]], look_seconds=1.0),
    )
    sent: list[Any] = []
    controller, _, _ = a_pipeline(sent.append, defer=True)
    steps = [replace(step, epoch=1 + (step.number > 2)) for step in drawn_steps([3, 3, 3, 3], first=0)]
    controller.run(iter(steps))
    deferred = [item.deferred for item in sent if isinstance(item, StepEnd)]
    assert deferred[1] == deferred[3] == 0 and deferred[0] > 0 and deferred[2] > 0


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 1 << 16))
def test_the_trainer_gets_whole_steps_in_order(sizes: list[int], first: int, seed: int) -> None:
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        by_chance(patch, seed)
        controller, generator, recorded = a_pipeline(sent.append)
        steps = drawn_steps(sizes, first)
        controller.run(iter(steps))
    batches = Batches(first + 1, SAMPLES)
    for item in sent:
        if isinstance(item, PromptGroup):
            batches.add(item)  # refuses what is not whole, not of the step, or too old
        else:
            assert isinstance(item, StepEnd)
            drawn = steps[item.step - first - 1]
            samples = batches.complete(item.step, item.prompts)
            assert sorted(sample.prompt for sample in samples) == sorted(drawn.prompts * SAMPLES)
            assert item.client_states == {"episode": 0, GENERATOR: GeneratorState(item.step)}
    numbers = [step.number for step in steps]
    assert [item.step for item in sent if isinstance(item, StepEnd)] == generator.handed == numbers
    assert generator.lengths == [(step.number, len(step.prompts) * SAMPLES) for step in steps]
    # Rollout stages follow each other: one begins where the one before ended.
    stages = [event for event in recorded if isinstance(event, (RolloutStarted, RolloutFinished))]
    assert [event.step for event in stages] == [number for number in numbers for _ in range(2)]
    assert [type(event) for event in stages] == [RolloutStarted, RolloutFinished] * len(numbers)
    assert all(any(e.step == number for e in recorded if isinstance(e, EngineStep)) for number in numbers)
    assert any(isinstance(event, Note) and "slow" in event.text for event in recorded)


def test_an_evaluation_comes_before_the_step_that_would_change_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 1)
    sent: list[Any] = []
    controller, _, _ = a_pipeline(sent.append, lambda version: sent.append(("eval", version, {})))
    controller.run(iter(drawn_steps([2] * 5, first=3)))
    order = [item.step if isinstance(item, StepEnd) else -item[1] for item in sent if not isinstance(item, PromptGroup)]
    # Not of the weights that the run began with: they were evaluated before, or are the given model's.
    assert order == [4, -4, 5, -5, 6, -6, 7, 8]


def test_a_wait_is_bounded_and_says_who_owes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 1)
    monkeypatch.setattr(pipeline.ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    controller, _, _ = a_pipeline(lambda item: None)
    with pytest.raises(PipelineWaitError, match=r"3 prompt groups of step 9 .* version 8 .* up to step 8"):
        controller.run(iter(drawn_steps([3, 3], first=8)))


def trained(sent: list[Any]) -> list[str]:
    """The prompts that got to the trainer, in whole steps."""
    first = next(item.step for item in sent if isinstance(item, PromptGroup))
    batches, found = Batches(first, SAMPLES), []
    for item in sent:
        if isinstance(item, PromptGroup):
            batches.add(item)
        else:
            found += [sample.prompt for sample in batches.complete(item.step, item.prompts)][::SAMPLES]
    return found


@pytest.mark.parametrize("when", ["gone", "unreached"])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_lost_engine_owed_is_generated_by_the_others(
    monkeypatch: pytest.MonkeyPatch, seed: int, when: str
) -> None:
    """It dies while it generates, or before it was given anything."""
    by_chance(monkeypatch, seed)
    sent: list[Any] = []
    controller, generator, _ = a_pipeline(sent.append)
    getattr(generator, when).add(1)
    begin = generator.begin

    def dies(step: Any, *others: Any) -> None:
        # It is found to be gone when something fails, not before.
        begin(step, *others)
        generator.losses.dead.add(1)

    monkeypatch.setattr(generator, "begin", dies)
    steps = drawn_steps([3, 3, 2], first=0)
    controller.run(iter(steps))
    assert sorted(trained(sent)) == sorted(prompt for step in steps for prompt in step.prompts)
    assert generator.again == [(1, 1, 0)]


def test_an_evaluation_is_left_out_if_its_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 1)
    sent: list[Any] = []

    def evaluate(version: int) -> None:
        if version == 2:
            generator.gone.add(1)
            generator.losses.dead.add(1)
            raise ray.exceptions.RayActorError()
        sent.append(("eval", version, {}))

    controller, generator, recorded = a_pipeline(sent.append, evaluate)
    steps = drawn_steps([2] * 5, first=0)
    controller.run(iter(steps))
    assert [item[1] for item in sent if isinstance(item, tuple)] == [1, 3]
    notes = [event.text for event in recorded if isinstance(event, Note) and "not evaluated" in event.text]
    assert notes == ["weight version 2 is not evaluated, because an engine was lost meanwhile"]
    whole = [item for item in sent if not isinstance(item, tuple)]
    assert sorted(trained(whole)) == sorted(prompt for step in steps for prompt in step.prompts)


def test_an_evaluation_that_fails_with_all_engines_there_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 1)

    def evaluate(version: int) -> None:
        raise ray.exceptions.RayActorError()

    controller, _, _ = a_pipeline(lambda item: None, evaluate)
    with pytest.raises(ray.exceptions.RayActorError):
        controller.run(iter(drawn_steps([2] * 5, first=0)))


@pytest.mark.parametrize("when", ["gone", "unreached"])
def test_an_engine_that_fails_and_is_there_ends_the_run(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    by_chance(monkeypatch, 1)
    controller, generator, _ = a_pipeline(lambda item: None)
    getattr(generator, when).add(1)
    with pytest.raises(ray.exceptions.RayActorError):
        controller.run(iter(drawn_steps([3, 3], first=0)))


def test_a_step_without_any_reward_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance(monkeypatch, 1)
    controller, generator, _ = a_pipeline(lambda item: None)
    generator.failing = {"0": [RewardLateError("late")]}
    with pytest.raises(NoRewardError, match="no prompt group of step 1 has got"):
        controller.run(iter(drawn_steps([1], first=0)))
