"""Outliers: who leaves its rank group, and for where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.outliers import (
    BETA_FLOOR,
    Destination,
    Growth,
    RunningEngine,
    RunningEngines,
    beta,
    destination,
    last_count,
)


@given(st.integers(1, 1000))
def test_a_tenth_is_a_tenth_in_floating_point_too(tenths: int) -> None:
    assert last_count(10 * tenths) == tenths
    assert last_count(10 * tenths + 1) == tenths + 1


def test_beta_is_the_75th_percentile_and_at_least_its_floor() -> None:
    assert beta([(100, 100), (100, 120), (100, 140), (100, 160), (100, 180)]) == pytest.approx(1.6)
    assert beta([(100, 50), (100, 60)]) == BETA_FLOOR
    assert beta([]) == BETA_FLOOR and beta([(0, 50)]) == BETA_FLOOR


def test_a_short_rank_groups_outlier_stays_in_the_step() -> None:
    engines = RunningEngines([RunningEngine(0, 0, 1, 9000), RunningEngine(1, 1, 7, 9000), RunningEngine(2, 2, 5, 9000)])
    assert destination(4000, 0, engines) == Destination("same_step", 2)
    assert destination(4000, 1, engines) == Destination("same_step", 2)
    assert destination(4000, 2, engines) == Destination("next_step", None)
    assert destination(9001, 0, engines) == Destination("next_step", None)
    # Nor does it go to the engine that it is on.
    assert destination(4000, 0, engines, 2) == Destination("same_step", 1)


ENGINE = st.builds(RunningEngine, st.integers(0, 8), st.integers(-1, 3), st.integers(1, 4), st.integers(0, 30))


@given(
    st.lists(ENGINE, unique_by=lambda engine: engine.engine),
    st.lists(st.one_of(ENGINE, st.integers(0, 8)), max_size=8),
    st.integers(0, 30),
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(0, 8)),
)
def test_engines_kept_in_order_are_as_if_all_were_looked_at(
    begin: list[RunningEngine], changes: list[RunningEngine | int], context: int, rank_group: int, source: int | None
) -> None:
    known, kept = {engine.engine: engine for engine in begin}, RunningEngines(begin)
    for change in changes:
        if isinstance(change, RunningEngine):
            known[change.engine] = change
            kept.put(change)
        else:
            known.pop(change, None)
            kept.remove(change)
    fitting = [
        engine
        for engine in known.values()
        if engine.rank_group > rank_group and engine.free_tokens >= context and engine.engine != source
    ]
    fewest = min(fitting, key=lambda engine: (engine.running, engine.engine), default=None)
    assert destination(context, rank_group, kept, source).engine == (fewest.engine if fewest else None)


def test_growth_is_the_newest_of_each_prompt() -> None:
    growth = Growth()
    assert growth.beta() == BETA_FLOOR and growth.beta(1.0) == 1.0
    growth.note(2, "a", 100, 200)
    growth.note(2, "b", 100, 300)
    assert growth.beta() == beta([(100, 200), (100, 300)])
    growth.note(3, "a", 200, 1000)
    growth.note(3, "never seen", None, 7)
    assert growth.beta() == beta([(200, 1000), (100, 300)])
    # Two epochs later nothing is known of the second any more.
    growth.note(4, "never seen", None, 7)
    assert growth.beta() == beta([(200, 1000)])
