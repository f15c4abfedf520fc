"""Two runs compared step by step: which steps count, what a gain is, and when it is a result."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry.event_log import Recorded
from rhyme_openrlhf.telemetry.events import Event, RolloutFinished, TrainStep
from rhyme_openrlhf.telemetry.metrics import WARM_UP
from rhyme_openrlhf.telemetry.two_runs import common, gain, rollout_gain, step_gain, steps_of


def records(speeds: list[float], train_s: float = 1.0) -> list[Recorded]:
    """The record of a run whose steps generate 1,000 tokens at these speeds."""
    found: list[Event] = []
    for step, speed in enumerate(speeds, start=1):
        seconds = 1000 / speed
        epoch = (step + 1) // 2
        found.append(RolloutFinished(step, epoch, seconds, 8, 1000, 0.5, 125.0, 125.0, 200.0, 250, 0))
        found.append(TrainStep(step, epoch, {"rollout": seconds, "train": train_s}, {}))
    return [Recorded(event, 0.0, "test", 0) for event in found]


def test_only_common_steps_behind_the_warm_up_count() -> None:
    first, second = steps_of(records([100] * 5)), steps_of(records([1, 1, 200, 200, 200, 900]))
    pairs = common(first, second)
    assert len(pairs) == 5 - WARM_UP
    found = rollout_gain(pairs)
    assert found is not None and (found.ratio, found.steps) == (pytest.approx(2.0), 3) and found.differs


def test_whole_steps_gain_less_than_rollouts() -> None:
    pairs = common(steps_of(records([100] * 6)), steps_of(records([200] * 6)))
    found = step_gain(pairs)
    assert found is not None and found.ratio == pytest.approx(11 / 6)


def test_a_step_that_was_done_again_counts_once() -> None:
    again = [*records([100, 100, 100]), *records([100, 100, 400])[-2:]]
    assert steps_of(again)[3].rollout_speed == pytest.approx(400) and len(steps_of(again)) == 3


def test_a_rollout_without_training_is_no_finished_step() -> None:
    assert len(steps_of(records([100, 100])[:-1])) == 1


@pytest.mark.parametrize(
    ("ratios", "differs", "is_exact"),
    [
        ([1.5, 1.6, 1.4, 1.5], True, True),
        ([0.7, 0.71, 0.69], True, True),
        ([1.2, 0.9, 1.1, 0.9], False, True),
        ([9.0, 30.0, 90.0], True, False),
        ([9.0, 0.2, 1.0], False, False),
    ],
)
def test_a_difference_is_beyond_the_noise_and_a_figure_has_little(
    ratios: list[float], differs: bool, is_exact: bool
) -> None:
    found = gain(ratios)
    assert found is not None and (found.differs, found.is_exact) == (differs, is_exact)


@given(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=30))
def test_the_runs_the_other_way_round_have_the_inverse_gain(ratios: list[float]) -> None:
    one, other = gain(ratios), gain([1 / ratio for ratio in ratios])
    assert one is not None and other is not None and one.differs == other.differs
    assert math.isclose(one.ratio * other.ratio, 1.0, rel_tol=1e-9)
    assert math.isclose(one.low * other.high, 1.0, rel_tol=1e-9)


def test_two_steps_say_nothing() -> None:
    assert gain([2.0, 2.0]) is None
