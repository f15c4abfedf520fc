"""Tier 1 and the order of the steps."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.rank_groups import ascending, engines_by_group, historical_length, rank_groups

histories = st.lists(st.none() | st.integers(1, 50), min_size=1, max_size=40)


def test_a_historical_length_is_the_median_of_the_last_responses() -> None:
    assert historical_length((3, 90, 4)) == 4 and historical_length(()) is None


@given(histories, st.integers(1, 12))
def test_groups_are_a_ranking_in_equal_shares(given_histories: list[int | None], groups: int) -> None:
    found = rank_groups(given_histories, groups)
    if all(history is None for history in given_histories):
        assert found == ()
        return
    assert sorted(prompt for group in found for prompt in group.prompts) == list(range(len(given_histories)))
    sizes = [len(group.prompts) for group in found]
    assert len(found) == min(groups, len(given_histories)) and max(sizes) - min(sizes) <= 1
    known = [[h for p in group.prompts if (h := given_histories[p]) is not None] for group in found]
    assert all(max(low) <= min(high) for low, high in itertools.combinations([k for k in known if k], 2))
    middle = statistics.median(length for length in given_histories if length is not None)
    filled = [middle if length is None else length for length in given_histories]
    assert [group.longest for group in found] == [max(filled[p] for p in group.prompts) for group in found]


def test_a_prompt_never_seen_stands_in_the_middle() -> None:
    found = rank_groups([9, None, 1, 5], 4)
    assert [group.prompts for group in found] == [(2,), (1,), (3,), (0,)]
    assert [group.mean_length for group in found] == [1, 5, 5, 9]


def test_equal_lengths_keep_the_prompts_order() -> None:
    assert [g.prompts for g in rank_groups([3] * 6, 3)] == [(0, 1), (2, 3), (4, 5)]


def test_odd_steps_ascend_and_even_ones_descend() -> None:
    assert engines_by_group(1, [1, 1, 2]) == [range(0, 1), range(1, 2), range(2, 4)]
    assert engines_by_group(2, [1, 1, 2]) == [range(3, 4), range(2, 3), range(0, 2)]
    assert ascending(3) and not ascending(4)


@given(st.integers(1, 30), st.floats(0, 100), st.floats(0, 10))
def test_linear_times_complement_each_other_exactly(engines: int, first: float, gradient: float) -> None:
    """One engine a rank group, finishing times linear: over two steps all engines are busy equally long."""
    busy = [0.0] * engines
    for step in (1, 2):
        for group, places in enumerate(engines_by_group(step, [1] * engines)):
            busy[places[0]] += first + group * gradient
    assert max(busy) == pytest.approx(min(busy))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_turning_the_order_round_is_the_best_order(times: list[float]) -> None:
    ordered = sorted(times)
    ours = max(low + high for low, high in zip(ordered, reversed(ordered), strict=True))
    best = min(max(a + b for a, b in zip(ordered, order, strict=True)) for order in itertools.permutations(ordered))
    assert ours == pytest.approx(best)
