"""Prompt keys are stable and distinct; owners move as little as possible."""

from __future__ import annotations

from collections import Counter

import pytest

from rhyme_openrlhf.prompt_keys import (
    evaluation_key,
    first_round,
    is_evaluation,
    owner,
    prompt_key,
    round_key,
    rounds,
    training_key,
)

KEYS = [prompt_key(f"prompt {number}") for number in range(4000)]


def test_keys_never_change() -> None:
    """Frozen: a checkpoint's history is found again only as long as this holds."""
    assert prompt_key("What is 2 + 2?", "math") == "94a4c00b5fd98984e7a54dd1b1e3b416"
    assert [owner(key, 16) for key in KEYS[:6]] == [15, 9, 2, 14, 3, 6]


def test_keys_tell_prompt_and_source_apart() -> None:
    assert len({prompt_key(*pair) for pair in [("bc", "a"), ("c", "ab"), ("abc",), ("", "abc")]}) == 4


def test_any_text_has_a_key() -> None:
    assert len(prompt_key("\ud800 ☃ \0")) == 32


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_owners_share_evenly_and_growing_moves_few(workers: int) -> None:
    before = [owner(key, workers) for key in KEYS]
    after = [owner(key, workers + 1) for key in KEYS]
    share = len(KEYS) / workers
    assert all(0.8 * share < count < 1.2 * share for count in Counter(before).values())
    assert set(before) == set(range(workers))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {workers}
    assert len(moved) < 1.2 * len(KEYS) / (workers + 1)


def test_no_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        owner("key", 0)


def test_all_rounds_of_a_prompt_have_one_owner_and_keys_of_their_own() -> None:
    for key in KEYS[:100]:
        of_rounds = [round_key(key, number) for number in range(12)]
        assert of_rounds[0] == key and len(set(of_rounds)) == 12
        assert {owner(one, 7) for one in of_rounds} == {owner(key, 7)}


def test_evaluations_have_keys_of_their_own_with_the_same_owner() -> None:
    for key in KEYS[:100]:
        for number in range(3):
            training = round_key(key, number)
            evaluation = round_key(evaluation_key(key), number)
            assert (is_evaluation(training), is_evaluation(evaluation)) == (False, True)
            assert owner(evaluation, 7) == owner(key, 7)
            assert training_key(evaluation) == training
            assert (first_round(training), first_round(evaluation)) == (key, evaluation_key(key))


def test_the_rounds_of_a_prompt_are_those_known_without_a_gap() -> None:
    known = {round_key(KEYS[0], number) for number in (0, 1, 2, 4)}
    assert list(rounds(KEYS[0], known.__contains__)) == [round_key(KEYS[0], number) for number in (0, 1, 2)]
    assert list(rounds(KEYS[1], known.__contains__)) == []
