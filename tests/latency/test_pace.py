"""Steps end when the profile says, or later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.pace import Pace, StepContent
from rhyme_openrlhf.latency.transfer_model import TransferModel
from tests.latency import formula

STEP = StepContent(100.0, 4, 400, 12)
SECONDS = formula.formula(4, 400, 12)


def test_a_fast_machine_waits_for_the_rest_of_the_step() -> None:
    assert Pace(formula.profile()).wait(STEP, 100.001) == pytest.approx(SECONDS - 0.001)


def test_a_slow_machine_waits_no_more_and_the_lateness_is_counted() -> None:
    pace = Pace(formula.profile())
    assert pace.wait(STEP, 101.0) == 0
    assert pace.late_seconds == pytest.approx(1.0 - SECONDS)


def test_steps_on_their_way_at_once_end_one_after_the_other() -> None:
    pace = Pace(formula.profile())
    first = pace.wait(STEP, 100.001)
    # Scheduled while the first one was computed.
    assert pace.wait(STEP, 100.001 + first) == pytest.approx(SECONDS)


def test_prefills_are_added() -> None:
    profile = formula.profile()
    content = StepContent(0.0, 4, 400, 12, (64, 512))
    alone = TransferModel(profile).prefill_seconds((64, 512))
    assert Pace(profile).seconds(content) == pytest.approx(SECONDS + alone) and alone > 0
    assert Pace(formula.profile(prefills=())).seconds(content) == pytest.approx(SECONDS)
    assert Pace(profile).seconds(StepContent(0.0, 0, 0, 0)) == 0


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), max_size=50))
def test_no_step_ends_early(steps: list[tuple[float, float]]) -> None:
    pace, now, ended = Pace(formula.profile()), 0.0, 0.0
    for idle, computing in steps:
        started = now = now + idle
        now += computing
        now += pace.wait(StepContent(started, 4, 400, 12), now)
        assert now - max(started, ended) >= SECONDS - 1e-9
        ended = now
