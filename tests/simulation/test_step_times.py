"""Sums of decode steps in closed form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency.profile import StepPoint
from rhyme_openrlhf.simulation import step_times
from rhyme_openrlhf.simulation.step_times import StepTimes
from tests.latency import formula
from tests.simulation.kinds import TIMES

step = st.tuples(st.integers(1, 100), st.floats(0, 40_000), st.integers(0, 300))


@settings(deadline=None)
@given(step, st.integers(0, 200), st.floats(0.5, 300))
def test_a_total_is_the_sum_of_its_steps(case: tuple[int, float, int], steps: int, growth: float) -> None:
    running, context, drafts = case
    each = [TIMES.seconds(running, context + i * growth, drafts) for i in range(steps)]
    assert TIMES.total(running, context, drafts, steps, growth) == pytest.approx(sum(each), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(step, st.integers(0, 200), st.floats(0.5, 300), st.floats(0, 5))
def test_steps_until_a_time_are_the_fewest(
    case: tuple[int, float, int], most: int, growth: float, seconds: float
) -> None:
    running, context, drafts = case
    found = TIMES.steps_until(running, context, drafts, most, growth, seconds)
    assert found == most or TIMES.total(running, context, drafts, found, growth) >= seconds
    assert found == 0 or TIMES.total(running, context, drafts, found - 1, growth) < seconds


def test_steps_until_a_time_behind_a_sharp_bend_are_found_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method would creep there, one step at a time."""
    cheap = tuple(
        StepPoint(1, context, 0, seconds, 0.0, 9) for context, seconds in ((1, 1e-6), (9000, 1e-6), (9001, 1.0))
    )
    times = StepTimes(formula.profile(steps=cheap))
    asked = 0
    whole = step_times._Course.total

    def counted(*case: Any) -> float:
        nonlocal asked
        asked += 1
        return whole(*case)

    for seconds in (1e-5, 8e-3, 0.5, 100.0):
        with monkeypatch.context() as patch:
            patch.setattr(step_times._Course, "total", counted)
            found = times.steps_until(1, 0.0, 0, 20_000, 1.0, seconds)
        assert times.total(1, 0.0, 0, found, 1.0) >= seconds > times.total(1, 0.0, 0, found - 1, 1.0)
    assert 4 < asked < 4 * 30


@settings(deadline=None)
@given(step)
def test_between_and_at_the_profiled_contexts_the_model_itself_answers(case: tuple[int, float, int]) -> None:
    running, context, drafts = case
    whole = int(context)
    assert TIMES.seconds(running, whole, drafts) == pytest.approx(TIMES.model.seconds(running, whole, drafts), rel=1e-6)
