"""The replay of a stage: against counting token by token, and the best switch is the best."""

from __future__ import annotations

import pytest
from switch_decisions import Replay, Response, dealt, stages, steps_seconds

from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject
from rhyme_openrlhf.latency.step_model import StepModel


def profile(size: int, first: float, more: float) -> Profile:
    """A step takes `first` seconds and `more` for each sample."""
    steps = tuple(
        StepPoint(running, context, 0, first + more * running, 0.0, 1) for running in (1, 100) for context in (0, 10**6)
    )
    return Profile(Subject("m", "h", "float32", size), "derived", steps)


PROFILES = profile(1, 0.010, 0.001), profile(2, 0.006, 0.002)
# Two prompts of two samples each on two engines; the second one runs on.
STAGE = [
    Response(0, 8, 100, (100, 90)),
    Response(0, 8, 90, (100, 90)),
    Response(1, 8, 100, (95, 2000)),
    Response(1, 8, 2000, (95, 2000)),
]


def test_steps_take_what_as_many_samples_take() -> None:
    clock = steps_seconds(StepModel(PROFILES[0]), [8, 8], [3, 5])
    assert clock == pytest.approx([0, 0.012, 0.024, 0.036, 0.047, 0.058])


def test_a_stage_and_its_switches_are_as_counted() -> None:
    replay = Replay(dealt(STAGE, 2), PROFILES, 1, 0.02)
    assert replay.seconds == pytest.approx(100 * 0.012 + 1900 * 0.011)
    assert replay.ends()[-1] == pytest.approx(replay.seconds)
    # With nobody left but the long one: 1,900 tokens more where a step takes 8 ms.
    assert replay.switched(1.2001) == pytest.approx(1.2001 + 0.02 + 1900 * 0.008)
    # A sample goes on behind its last whole step.
    seen, rest, engines = replay.unfinished(1.2 + 0.0111)
    assert [one.generated for one in seen] == [101] and rest == [1899] and engines == [0]
    # All four at once, where each costs more, until one is left.
    assert replay.switched(0.0) == pytest.approx(0.08 + 90 * 0.014 + 10 * 0.012 + 1900 * 0.008)


def test_no_policy_is_better_than_the_best() -> None:
    replay = Replay(dealt(STAGE, 2), PROFILES, 1, 0.02)
    best = replay.best(0.25)
    assert best <= replay.switched(1.2001)
    for rule in ("history", "maximum"):
        seconds, samples = replay.policy(rule, 2000, 0.25)
        assert samples and best <= seconds < replay.seconds


def test_a_stage_has_only_prompts_that_were_seen() -> None:
    steps = [[("a", 8, [3, 4])], [("b", 8, [5, 6])], [("a", 8, [7, 8])], [("b", 8, [9, 1])]]
    found = stages(steps, 2, 1)
    assert [[(one.length, one.earlier) for one in stage] for stage in found] == [
        [(14, (6, 8)), (16, (6, 8))],
        [(18, (10, 12)), (2, (10, 12))],
    ]
