"""Tier 1 and tier 2 together: every prompt has an engine, and long ones alternate over the engines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.engine_shares import plan_shares
from rhyme_openrlhf.scheduling.group_time import GroupTime, Speculation
from rhyme_openrlhf.scheduling.rank_groups import LengthHistory, rank_groups
from rhyme_openrlhf.scheduling.step_plan import (
    MOST_RANK_GROUPS,
    by_load,
    by_rank,
    most_rank_groups,
    placed,
    second_tier,
    usual_rank_groups,
)
from tests.latency import formula


def known(*medians: float | None) -> list[LengthHistory | None]:
    return [None if median is None else LengthHistory(median, 2 * median) for median in medians]


def test_usually_there_are_half_as_many_rank_groups_as_engines() -> None:
    assert [usual_rank_groups(engines) for engines in (1, 4, 5, 8, 31)] == [2, 2, 2, 4, 15]
    assert usual_rank_groups(100) == MOST_RANK_GROUPS


def test_two_steps_complement_each_other() -> None:
    histories = known(10, 40, 20, 30)
    odd, even = (by_rank(step, histories, 2, 16, lambda groups: None) for step in (1, 2))
    assert odd is not None and even is not None
    assert odd.engine_of == (0, 1, 0, 1) and even.engine_of == (1, 0, 1, 0)
    assert odd.rank_group_of == (0, 1) and even.rank_group_of == (1, 0)


def test_a_cold_prompt_stands_in_the_middle_and_without_history_there_are_no_rank_groups() -> None:
    placement = by_rank(1, known(10, None, 90, 50, 30), 5, 16, lambda groups: None)
    assert placement is not None and placement.engine_of == (0, 2, 4, 3, 1)
    assert by_rank(1, known(None, None), 2, 16, lambda groups: None) is None
    assert by_load([None] * 4, 2).engine_of == (0, 1, 0, 1)


@given(st.lists(st.none() | st.integers(1, 99), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 9))
def test_every_prompt_is_on_an_engine_of_its_rank_group(lengths: list[int | None], engines: int, most: int) -> None:
    placement = by_rank(3, known(*lengths), engines, most, lambda groups: None)
    if placement is None:
        assert not any(lengths)
        return
    assert sum(placement.shares) == engines and len(placement.engine_of) == len(lengths)
    for number, group in enumerate(placement.rank_groups):
        assert all(placement.rank_group_of[placement.engine_of[prompt]] == number for prompt in group.prompts)


def test_one_engine_or_one_rank_group_is_placed_by_load() -> None:
    assert most_rank_groups(0, 1) == 1 and most_rank_groups(0, 8) == 4 and most_rank_groups(3, 8) == 3
    histories = known(10, 40, 20, 30)
    assert placed(1, histories, 2, 1, lambda groups: None) == by_load([None] * 4, 2)
    assert placed(1, known(None, None), 2, 2, lambda groups: None) == by_load([None] * 2, 2)
    assert placed(1, histories, 2, 2, lambda groups: None) == by_rank(1, histories, 2, 2, lambda groups: None)


def test_the_second_tier_divides_engines_by_the_rank_groups_times() -> None:
    predictor = Predictor(StepModel(formula.profile()))
    groups = rank_groups(known(*range(100, 900, 50)), 2)
    time_of = GroupTime(predictor.step_seconds, 32, 20.0, 8, Speculation(1.5, 2.0))
    plan = plan_shares([group.mean_length for group in groups], 6, time_of, 0.5)
    assert second_tier(groups, 6, 64, 20.0, 8, predictor, Speculation(1.5, 2.0), 0.5) == plan.engines
    assert second_tier(groups, 2, 64, 20.0, 8, predictor, Speculation(), 0.0) is None


def test_a_prompts_history_is_the_median_and_the_longest() -> None:
    assert LengthHistory.of((3, 9, 4)) == LengthHistory(4, 9) and LengthHistory.of(()) is None
