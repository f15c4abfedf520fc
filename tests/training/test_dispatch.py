"""Prompts by predicted work, in OpenRLHF's own dispatch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.training.dispatch import routed


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
