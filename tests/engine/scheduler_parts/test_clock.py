"""The clock's choice of decode steps, and the start and end of each timing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.engine.scheduler_parts import DecodeStep
from rhyme_openrlhf.engine.scheduler_parts.clock import StepClock, content_of
from rhyme_openrlhf.latency.pace import StepContent


def output(scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None) -> Any:
    return SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafts or {})


def requests(**computed: tuple[int, int]) -> Any:
    """Response tokens, and tokens computed with this step's."""
    return {name: SimpleNamespace(num_output_tokens=n, num_computed_tokens=c) for name, (n, c) in computed.items()}


DECODING = requests(a=(5, 30), b=(1, 21))


def test_a_step_lasts_until_the_next_is_scheduled() -> None:
    clock = StepClock()
    assert clock.scheduled(content_of(output({"a": 1, "b": 3}, {"b": [7, 8]}), DECODING, 10.0)) is None
    assert clock.scheduled(content_of(output({"a": 1}), DECODING, 10.5)) == DecodeStep(2, 47, 2, 0.5)
    assert clock.scheduled(content_of(output({"a": 1}), DECODING, 10.75)) == DecodeStep(1, 29, 0, 0.25)


def test_steps_with_prefill_or_without_anything_are_not_timed() -> None:
    clock = StepClock()
    for other in ({"a": 1, "b": 9}, {}):
        clock.scheduled(content_of(output(other), DECODING, 1.0))
        assert clock.scheduled(content_of(output({"a": 1}), DECODING, 2.0)) is None
    # One prompt token left to compute looks like a decode step.
    clock.scheduled(content_of(output({"a": 1}), requests(a=(0, 8)), 3.0))
    assert clock.scheduled(content_of(output({"a": 1}), DECODING, 4.0)) is None


def test_a_pause_is_not_part_of_a_step() -> None:
    clock = StepClock()
    clock.scheduled(content_of(output({"a": 1}), DECODING, 1.0))
    clock.interrupted()
    assert clock.scheduled(content_of(output({"a": 1}), DECODING, 99.0)) is None


def test_a_planned_step_lasts_until_the_next_is_planned() -> None:
    clock = StepClock()
    assert clock.planned(9.0) is None
    clock.scheduled(content_of(output({"a": 1, "b": 9}), DECODING, 9.5))
    # A prefill is not timed, and what follows it at once is.
    assert clock.planned(9.9) is None
    clock.scheduled(content_of(output({"a": 1, "b": 3}, {"b": [7, 8]}), DECODING, 10.0))
    assert clock.planned(10.5) == DecodeStep(2, 47, 2, 10.5 - 9.9)
    # Asked twice, it is the same step.
    assert clock.planned(10.6) is None
    assert clock.scheduled(content_of(output({"a": 1}), DECODING, 10.75)) == DecodeStep(2, 47, 2, 0.75)
    assert clock.planned(11.0) == DecodeStep(1, 29, 0, 11.0 - 10.6)


def test_a_step_that_nobody_planned_is_not_timed_from_a_plan() -> None:
    clock = StepClock()
    for begun in (1.0, 2.0):
        clock.scheduled(content_of(output({"a": 1}), DECODING, begun))
    assert clock.planned(3.0) is None
    clock.scheduled(content_of(output({"a": 1}), DECODING, 4.0))
    clock.scheduled(content_of(output({"a": 1}), DECODING, 5.0))
    assert clock.planned(6.0) is None


def test_a_pause_before_a_planned_step_is_not_part_of_it() -> None:
    clock = StepClock()
    clock.scheduled(content_of(output({"a": 1}), DECODING, 1.0))
    clock.interrupted()
    assert clock.planned(1.5) is None
    clock.scheduled(content_of(output({"a": 1}), DECODING, 99.0))
    assert clock.planned(99.5) is None


def test_decoding_samples_and_prefills_are_told_apart() -> None:
    # Scheduling has counted the step's own tokens: 30 of "a" were there before. "back" lost its cache to others.
    there = requests(a=(5, 34), b=(1, 21), new=(0, 64), longer=(0, 512), back=(40, 90))
    scheduled = {"a": 4, "b": 1, "new": 64, "longer": 128, "back": 90}
    found = content_of(output(scheduled, {"a": [7, 8, 9]}), there, 7.0)
    assert found == StepContent(7.0, running=2, context=30 + 20, drafts=3, prefills=(64, 128, 90))


def test_a_step_that_is_not_timed_is_none_and_what_follows_it_is() -> None:
    clock = StepClock()
    clock.scheduled(content_of(output({"a": 1}), DECODING, 1.0))
    clock.skipped()
    assert clock.planned(2.0) is None
    assert clock.scheduled(content_of(output({"a": 1}), DECODING, 2.5)) is None
    assert clock.planned(3.0) == DecodeStep(1, 29, 0, 1.0)


def test_steps_of_an_engine_without_speculation_are_timed_while_it_is_measured(plain_engine: Any) -> None:
    """On a real engine, whose scheduling is vLLM's choice."""
    from vllm import SamplingParams

    def generate() -> list[Any]:
        parameters = SamplingParams(temperature=1.0, max_tokens=12, min_tokens=12, ignore_eos=True)
        plain_engine.generate([[5, 6, 7 + number] for number in range(3)], [parameters] * 3)
        return plain_engine.scheduler("take_steps")

    plain_engine.scheduler("force_drafts", 0)
    try:
        steps = [step for step in generate() if step[0] == 3]
    finally:
        plain_engine.scheduler("force_drafts", None)
    # Of eleven decode steps the first may still have a prefill beside it, and the last have no next one.
    assert 6 <= len(steps) <= 11
    for running, context, drafts, seconds in steps:
        assert (running, drafts) == (3, 0) and 9 <= context <= 3 * 15 and 0 < seconds < 60
    assert generate() == []
