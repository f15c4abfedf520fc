"""The knowledge of prompts by which a simulated run plans a step."""

from __future__ import annotations

from rhyme_openrlhf.simulation.planner import History
from rhyme_openrlhf.simulation.workload import PromptLoad


def test_lengths_as_an_array_are_the_last_ones() -> None:
    history = History()
    assert history.column(3).tolist() == []
    for epoch, lengths in enumerate(((5, 7), (9, 2, 4)), 1):
        history.note(epoch, PromptLoad(3, 10, lengths))
        assert history.column(3).tolist() == list(history.lengths(3)) == list(lengths)
