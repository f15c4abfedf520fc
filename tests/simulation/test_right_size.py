"""Right-sizing: the fewest engines that are fast enough, on samples no older than the run's."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.simulation.recorded_run import RecordedRun
from rhyme_openrlhf.simulation.result import Result, StepTimesOf
from rhyme_openrlhf.simulation.right_size import (
    AS_IT_WAS,
    HEADINGS,
    KEPT,
    Candidate,
    chosen,
    feature_sets,
    latest,
    right_size,
    sizes,
)
from rhyme_openrlhf.simulation.settings import AS_PROFILED, Cluster, Features
from rhyme_openrlhf.simulation.speculation import Rates
from rhyme_openrlhf.simulation.study import Variant
from rhyme_openrlhf.simulation.workload import drawn
from tests.simulation.kinds import PROFILES, SHAPE


def recorded(trainer: str, engines: int = 8, tokens_per_second: float = 20_000.0) -> RecordedRun:
    """Return a run with the trainer `trainer`, as read from a run directory."""
    workload = drawn(SHAPE, 4, 8, 4, 2, seed=5)
    cluster = Cluster(devices=engines, running=32, trainer_tokens_per_second=tokens_per_second)
    features = Features(trainer, dispatch=True, as_placed=trainer != "pipeline", speculation="measured")  # type: ignore[arg-type]
    return RecordedRun(workload, cluster, features, (Rates(1.5, 2.0, 4.0),) * 4, (), ())


def candidate(engines: int, speed: float, older: bool = False) -> Candidate:
    result = Result([StepTimesOf(1, 1000, 1000, trained=1000 / speed)])
    return Candidate("", Variant("", Cluster(devices=engines), Features()), result, older)


many = st.lists(
    st.builds(candidate, st.integers(1, 64), st.floats(0.1, 100.0), st.booleans()), min_size=1, max_size=12
).filter(lambda found: not all(one.older for one in found))


@given(many)
def test_the_fewest_engines_that_are_fast_enough_are_recommended(found: list[Candidate]) -> None:
    best = chosen(found)
    allowed = [one for one in found if not one.older]
    most = max(one.result.samples_per_second for one in allowed)
    assert not best.older and best.result.samples_per_second >= KEPT * most
    for one in allowed:
        if one.engines < best.engines:
            assert one.result.samples_per_second < KEPT * most
        if one.engines == best.engines:
            assert one.result.samples_per_second <= best.result.samples_per_second


def test_the_latest_steps_are_kept_whole() -> None:
    run = recorded("sync")
    assert latest(run, 10**6) == run
    assert len(latest(run, 2 * 32 + 1).workload.steps) == 2 == len(latest(run, 64).rates)
    assert latest(run, 1).workload.steps == run.workload.steps[-1:]


def test_sizes_are_around_the_runs_own() -> None:
    assert sizes(96) == [12, 24, 36, 48, 72, 144, 192]
    assert sizes(1) == [2] and sizes(2) == [1, 3, 4]


def test_a_synchronous_run_stays_on_policy() -> None:
    found = right_size(recorded("sync"), PROFILES, {}, [AS_PROFILED] * 4)
    assert found.best.variant.features.trainer == "sync"
    assert {one.older for one in found.candidates if one.variant.features.trainer != "sync"} == {True}
    assert found.candidates[0].name == AS_IT_WAS and found.candidates[0].variant.features.as_placed


def test_a_slow_trainer_needs_few_engines() -> None:
    slow = right_size(recorded("async", tokens_per_second=300.0), PROFILES, {}, [AS_PROFILED] * 4)
    quick = right_size(recorded("async", tokens_per_second=1e6), PROFILES, {}, [AS_PROFILED] * 4)
    assert slow.best.engines < quick.best.engines
    assert slow.best.per_device > slow.candidates[0].per_device
    assert f"recommended (simulated): {slow.best.engines} rollout engine" in slow.sentence
    flags = slow.settings({1: "mine.json"}).flags
    assert flags[:2] == ("--vllm.num_engines", str(slow.best.engines))


def test_the_table_marks_one_row_and_compares_with_the_first() -> None:
    found = right_size(recorded("sync"), PROFILES, {}, [AS_PROFILED] * 4)
    rows = found.rows()
    assert {len(row) for row in rows} == {len(HEADINGS)}
    assert [row[-1] for row in rows].count("recommended") == 1 and rows[0][3:5] == ("1.00", "1.00")
    assert any("without drafts" in row[1] for row in rows)


def test_only_sets_that_can_run_and_act_are_compared() -> None:
    run = recorded("pipeline", engines=2)
    assert not any("two-tier" in name for name in feature_sets(run, PROFILES[1]))
    more = dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, devices=8))
    assert any("two-tier" in name for name in feature_sets(more, PROFILES[1]))


def test_a_profile_without_prefills_compares_no_moves() -> None:
    bare = dataclasses.replace(PROFILES[1], prefills=())
    sets = feature_sets(recorded("async"), bare)
    assert "pipeline" in sets and not any(one.reallocation or one.outliers for one in sets.values())
    found = right_size(recorded("async"), {1: bare}, {}, [AS_PROFILED] * 4)
    assert any("has no prefills" in one for one in found.assumed)


@pytest.mark.parametrize("trainer", ["sync", "async", "pipeline"])
def test_it_is_the_same_again(trainer: str) -> None:
    run = recorded(trainer)
    once = right_size(run, PROFILES, {}, [AS_PROFILED] * 4)
    assert once.rows() == right_size(run, PROFILES, {}, [AS_PROFILED] * 4).rows()
