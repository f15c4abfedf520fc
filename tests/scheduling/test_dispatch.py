"""Dispatch by predicted work."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.dispatch import assign, by_predicted_work

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
