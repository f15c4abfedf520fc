"""How slow a run's engines were, and what of that was known when a step began."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.simulation.conditions import AS_PROFILED, Busy, Conditions, known_before, recorded
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import Shape, drawn
from tests.latency import formula

PROFILE = formula.profile(weight_load_seconds=0.0)
LOAD = drawn(Shape("test", "drawn", median=100.0, sigma=0.8, longest=1000, prompt_tokens=40), 3, 6, 4, 3, seed=3)
CLUSTER = Cluster(devices=2, running=64, trainer_tokens_per_second=5000.0)

conditions = st.builds(Conditions, st.floats(0.2, 5), st.floats(0, 2))


def test_slowness_is_busy_time_by_that_of_the_profile() -> None:
    busy = [Busy(3.0, 0.1), Busy(0.0, 0.0), Busy(2.0, 0.2)]
    assert recorded(busy, [2.0, 1.0, 0.0]) == (Conditions(1.5, 0.1), AS_PROFILED, Conditions(1.0, 0.2))


@given(st.lists(conditions, min_size=1, max_size=8), conditions, st.data())
def test_a_forecast_knows_nothing_of_its_own_step_or_later_ones(
    steps: list[Conditions], other: Conditions, data: st.DataObject
) -> None:
    known = known_before(steps)
    assert len(known) == len(steps) and known[0] == AS_PROFILED
    place = data.draw(st.integers(0, len(steps) - 1))
    changed = known_before([*steps[:place], *[other] * (len(steps) - place)])
    assert changed[: place + 1] == known[: place + 1]


def test_a_forecast_is_right_where_nothing_changes_but_what_the_first_stage_waits_for() -> None:
    known = known_before([Conditions(1.3, 0.9), *[Conditions(1.3, 0.1)] * 3])
    assert [one.slowness for one in known] == pytest.approx([1.0, 1.3, 1.3, 1.3])
    assert [one.around for one in known] == [0.0, 0.0, 0.1, 0.1]


@pytest.mark.parametrize("trainer", ["sync", "async"])
def test_a_stage_takes_as_many_times_as_long_and_what_is_around_it_longer(trainer: str) -> None:
    features = Features(trainer=trainer)  # type: ignore[arg-type]
    plain = Run(LOAD, CLUSTER, features, {1: PROFILE}).go()
    own = [Conditions(1.0, 0.0), Conditions(2.0, 0.0), Conditions(0.5, 0.25)]
    slowed = Run(LOAD, CLUSTER, features, {1: PROFILE}, conditions=own).go()
    for before, after, one in zip(plain.steps, slowed.steps, own, strict=True):
        assert after.busy == pytest.approx(one.slowness * before.busy)
        stage = one.slowness * (before.completed - before.generating) + one.around
        assert after.completed - after.generating == pytest.approx(stage)
    # Every device is somewhere all the time, on its way to its first sample too.
    assert sum(slowed.accounts.seconds.values()) == pytest.approx(2 * max(step.completed for step in slowed.steps))
    assert slowed.accounts.seconds["rollout"] == pytest.approx(sum(step.busy for step in slowed.steps) + 2 * 0.25)


def test_layouts_that_are_switched_to_are_as_slow() -> None:
    subject = dataclasses.replace(formula.SUBJECT, tensor_parallel_size=2)
    quick = tuple(dataclasses.replace(point, seconds=point.seconds / 3) for point in PROFILE.steps)
    profiles = {1: PROFILE, 2: dataclasses.replace(PROFILE, subject=subject, steps=quick)}
    features = Features("sync", switching="history")
    plain = Run(LOAD, CLUSTER, features, profiles).go()
    slowed = Run(LOAD, CLUSTER, features, profiles, conditions=[Conditions(2.0)] * 3).go()
    assert plain.switches and slowed.switches
    busy = [sum(step.busy for step in result.steps) for result in (plain, slowed)]
    assert busy[1] > 1.8 * busy[0]
