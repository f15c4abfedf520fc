"""Placement of prompts: by predicted work, or in rank groups, on whose engines long ones alternate."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.scheduling.engine_shares import plan_shares
from rhyme_openrlhf.scheduling.length_prior import Expected
from rhyme_openrlhf.scheduling.rank_groups import rank_groups
from rhyme_openrlhf.scheduling.step_plan import (
    MOST_RANK_GROUPS,
    GroupTime,
    Speculation,
    assign,
    by_load,
    by_predicted_work,
    by_rank,
    most_rank_groups,
    placed,
    second_tier,
    usual_rank_groups,
)
from tests.latency import formula

lengths = st.lists(st.none() | st.integers(1, 1000), max_size=40)


def test_without_history_the_least_loaded_gets_the_next_prompt() -> None:
    assert assign([None] * 7, [0, 0, 0]) == [0, 1, 2, 0, 1, 2, 0]
    assert assign([None] * 3, [2, 0, 1]) == [1, 2, 1]


@given(lengths, st.integers(1, 8))
def test_every_prompt_goes_to_one_engine(given_lengths: list[int | None], engines: int) -> None:
    chosen = assign(given_lengths, [0.0] * engines)
    assert len(chosen) == len(given_lengths) and set(chosen) <= set(range(engines))


@given(st.integers(0, 50), st.integers(1, 8))
def test_equal_work_is_counted_out(prompts: int, engines: int) -> None:
    chosen = assign([5.0] * prompts, [0.0] * engines)
    counts = [chosen.count(engine) for engine in range(engines)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_engine_has_at_most_four_thirds_of_the_best(work: list[int], engines: int) -> None:
    def fullest(chosen: tuple[int, ...] | list[int]) -> float:
        return max(sum(w for w, e in zip(work, chosen, strict=True) if e == engine) for engine in range(engines))

    best = min(fullest(order) for order in itertools.product(range(engines), repeat=len(work)))
    assert fullest(assign(work, [0.0] * engines)) <= (4 / 3 - 1 / (3 * engines)) * best + 1e-9


def test_there_must_be_an_engine() -> None:
    with pytest.raises(ValueError, match="no engine"):
        assign([1.0], [])


def test_long_prompts_are_spread_and_unfinished_samples_count() -> None:
    lengths = [(100, 300), (10, 10), (190,), (20, 10)]
    chosen = by_predicted_work(lengths, [0, 0], 4)
    assert chosen is not None and chosen[0] != chosen[2] and chosen[1] != chosen[3]
    # Three samples of the mean length are worth more than one prompt.
    assert by_predicted_work([(300,), (300,)], [3, 0], 1) == [1, 1]
    assert by_predicted_work([(300,), (300,)], [3, 0], 4) == [1, 0]


def test_a_prompt_never_seen_counts_as_a_usual_one_and_no_history_is_no_choice() -> None:
    assert by_predicted_work([(), ()], [0, 5], 4) is None
    chosen = by_predicted_work([(50,), (), (50,), ()], [0, 0], 4)
    assert chosen is not None and sorted(chosen) == [0, 0, 1, 1]


def test_usually_there_are_half_as_many_rank_groups_as_engines() -> None:
    assert [usual_rank_groups(engines) for engines in (1, 4, 5, 8, 31)] == [2, 2, 2, 4, 15]
    assert usual_rank_groups(100) == MOST_RANK_GROUPS


def test_two_steps_complement_each_other() -> None:
    histories = [10, 40, 20, 30]
    odd, even = (by_rank(step, histories, 2, 16, lambda groups: None) for step in (1, 2))
    assert odd is not None and even is not None
    assert odd.engine_of == (0, 1, 0, 1) and even.engine_of == (1, 0, 1, 0)
    assert odd.rank_group_of == (0, 1) and even.rank_group_of == (1, 0)


def test_a_cold_prompt_stands_in_the_middle_and_without_history_there_are_no_rank_groups() -> None:
    placement = by_rank(1, [10, None, 90, 50, 30], 5, 16, lambda groups: None)
    assert placement is not None and placement.engine_of == (0, 2, 4, 3, 1)
    assert by_rank(1, [None, None], 2, 16, lambda groups: None) is None
    assert by_load([None] * 4, 2).engine_of == (0, 1, 0, 1)


@given(st.lists(st.none() | st.integers(1, 99), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 9))
def test_every_prompt_is_on_an_engine_of_its_rank_group(lengths: list[int | None], engines: int, most: int) -> None:
    placement = by_rank(3, lengths, engines, most, lambda groups: None)
    if placement is None:
        assert not any(lengths)
        return
    assert sum(placement.shares) == engines and len(placement.engine_of) == len(lengths)
    for number, group in enumerate(placement.rank_groups):
        assert all(placement.rank_group_of[placement.engine_of[prompt]] == number for prompt in group.prompts)


def test_one_engine_or_one_rank_group_is_placed_by_load() -> None:
    assert most_rank_groups(0, 1) == 1 and most_rank_groups(0, 8) == 4 and most_rank_groups(3, 8) == 3
    histories: list[float | None] = [10, 40, 20, 30]
    known, unknown = Expected(histories, histories), Expected([None, None], [None, None])
    assert placed(1, known, 2, 1, lambda groups: None) == by_load([None] * 4, 2)
    assert placed(1, unknown, 2, 2, lambda groups: None) == by_load([None] * 2, 2)
    assert placed(1, known, 2, 2, lambda groups: None) == by_rank(1, histories, 2, 2, lambda groups: None)


def test_the_second_tier_divides_engines_by_the_rank_groups_times() -> None:
    predictor = Predictor(StepModel(formula.profile()))
    groups = rank_groups(list(range(100, 900, 50)), 2)
    time_of = GroupTime(predictor.step_seconds, 32, 20.0, 8, Speculation(1.5, 2.0))
    plan = plan_shares([group.mean_length for group in groups], 6, time_of, 0.5)
    assert second_tier(groups, 6, 64, 20.0, 8, predictor, Speculation(1.5, 2.0), 0.5) == plan.engines
    assert second_tier(groups, 2, 64, 20.0, 8, predictor, Speculation(), 0.0) is None
