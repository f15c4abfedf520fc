"""Prompts by predicted work, in OpenRLHF's own dispatch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.training.samples_generator import choose, routed


def test_long_prompts_are_spread_and_unfinished_samples_count() -> None:
    lengths = [(100, 300), (10, 10), (190,), (20, 10)]
    chosen = choose(lengths, [0, 0], 4)
    assert chosen is not None and chosen[0] != chosen[2] and chosen[1] != chosen[3]
    # Three samples of the mean length are worth more than one prompt.
    assert choose([(300,), (300,)], [3, 0], 1) == [1, 1]
    assert choose([(300,), (300,)], [3, 0], 4) == [1, 0]


def test_a_prompt_never_seen_counts_as_a_usual_one_and_no_history_is_no_choice() -> None:
    assert choose([(), ()], [0, 5], 4) is None
    chosen = choose([(50,), (), (50,), ()], [0, 0], 4)
    assert chosen is not None and sorted(chosen) == [0, 0, 1, 1]


def test_each_prompt_goes_where_it_was_chosen_to_whichever_engine_upstream_takes() -> None:
    sent: list[tuple[int, Any]] = []

    def engine(number: int) -> Any:
        return SimpleNamespace(
            generate_responses=SimpleNamespace(remote=lambda **sent_with: sent.append((number, sent_with["prompt"]))),
            get_num_unfinished_requests=SimpleNamespace(remote=lambda: number),
        )

    first, second = routed([engine(0), engine(1)], [1, 1, 0])
    assert second.get_num_unfinished_requests.remote() == 1
    for stand_in, prompt in ((first, "a"), (second, "b"), (first, "c")):
        stand_in.generate_responses.remote(prompt=prompt)
    assert sent == [(1, "a"), (1, "b"), (0, "c")]
    with pytest.raises(StopIteration):
        first.generate_responses.remote(prompt="d")
