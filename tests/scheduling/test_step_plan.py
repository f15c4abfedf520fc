"""Tier 1 and tier 2 together: every prompt has an engine, and long ones alternate over the engines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.rank_groups import LengthHistory
from rhyme_openrlhf.scheduling.step_plan import MOST_RANK_GROUPS, by_load, by_rank, usual_rank_groups


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
