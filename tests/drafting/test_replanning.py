"""Which steps are planned anew."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.replanning import MOST_HELD, PLANNED_IN_A_ROW, PLANNING_SHARE, TIMED_EVERY, PlanTurns


def planned_of(turns: PlanTurns, steps: int, seconds: float, step_seconds: float, running: int = 1) -> list[bool]:
    """Of so many steps, which are planned."""
    planned = []
    for _ in range(steps):
        holds = turns.holds(running)
        planned.append(not holds)
        if not holds:
            turns.planned(seconds, step_seconds, MOST_HELD)
    return planned


def test_where_planning_takes_little_every_step_is_planned() -> None:
    assert all(planned_of(PlanTurns(), 100, 0.0001, 0.050))


@given(st.floats(1e-6, 1e-2), st.floats(1e-3, 1.0))
def test_planning_takes_no_more_than_its_share(seconds: float, step_seconds: float) -> None:
    """But for what it takes however seldom it is done, and rounding to whole steps."""
    period = PLANNED_IN_A_ROW + MOST_HELD
    planned = planned_of(PlanTurns(), 20 * period, seconds, step_seconds)
    share = sum(planned) / len(planned) * seconds / step_seconds
    least = PLANNED_IN_A_ROW / period * seconds / step_seconds
    assert share <= max(PLANNING_SHARE * 1.5, least * 1.1)


def test_planned_are_some_steps_in_a_row() -> None:
    planned = planned_of(PlanTurns(), 120, 0.0002, 0.005)
    assert planned[:PLANNED_IN_A_ROW] == [True] * PLANNED_IN_A_ROW
    runs = "".join("p" if one else "h" for one in planned).replace("hp", "h p").replace("ph", "p h").split()
    assert {len(run) for run in runs[:-1] if run[0] == "p"} == {PLANNED_IN_A_ROW}
    assert {len(run) for run in runs[:-1] if run[0] == "h"} == {30}


def test_other_samples_are_planned_anew() -> None:
    turns = PlanTurns()
    planned_of(turns, PLANNED_IN_A_ROW, 0.001, 0.005)
    assert turns.holds(1)
    assert planned_of(turns, PLANNED_IN_A_ROW, 0.001, 0.005, running=2) == [True] * PLANNED_IN_A_ROW


@pytest.mark.parametrize(("before", "now", "holds"), [(32, 30, True), (32, 36, True), (32, 27, False), (7, 8, False)])
def test_about_as_many_samples_go_by_the_same_plan(before: int, now: int, holds: bool) -> None:
    turns = PlanTurns()
    planned_of(turns, PLANNED_IN_A_ROW, 0.001, 0.005, running=before)
    assert turns.holds(now) == holds


def test_a_plan_holds_no_longer_than_it_may() -> None:
    for most in (0, 3):
        turns = PlanTurns()
        for _ in range(PLANNED_IN_A_ROW):
            assert not turns.holds(1)
            turns.planned(0.001, 0.005, most)
        assert [turns.holds(1) for _ in range(most + 1)] == [True] * most + [False]


def test_some_steps_by_a_plan_that_holds_are_timed_and_each_knows_whether_it_goes_on() -> None:
    turns = PlanTurns()
    planned_of(turns, PLANNED_IN_A_ROW, 0.001, 0.005)
    held = []
    while turns.holds(1):
        held.append((turns.times, turns.goes_on))
    assert len(held) == MOST_HELD
    timed, goes_on = zip(*held, strict=True)
    assert sum(timed) == MOST_HELD // TIMED_EVERY and not any(a and b for a, b in itertools.pairwise(timed))
    assert goes_on == (True,) * (MOST_HELD - 1) + (False,)
