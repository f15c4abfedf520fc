"""The knowledge of prompts by which a simulated run plans a step."""

from __future__ import annotations

from dataclasses import replace

from rhyme_openrlhf.simulation.planner import History
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Features
from rhyme_openrlhf.simulation.workload import PromptLoad, StepLoad, Workload
from tests.simulation.kinds import CLUSTER, PROFILES


def test_unseen_prompts_of_two_data_sets_have_rank_groups_when_a_step_has_ended() -> None:
    """The simulator ranks them as a run does: by what it learnt of the steps before."""
    steps = tuple(
        StepLoad(
            1,
            tuple(
                PromptLoad(100 * step + place, 10, (40 + 400 * (place % 2),) * 2, data_set=["chat", "math"][place % 2])
                for place in range(16)
            ),
        )
        for step in range(4)
    )
    for named in (True, False):
        loads = (
            steps
            if named
            else tuple(StepLoad(1, tuple(replace(prompt, data_set="") for prompt in step.prompts)) for step in steps)
        )
        ranked = Run(Workload("made", "", loads, 440), CLUSTER, Features("pipeline"), PROFILES)
        ranked.go()
        expected = ranked.history.prior.expected([None, None], ["chat", "math"] if named else ["", ""])
        assert expected.lengths == ([40, 440] if named else [None, None])


def test_lengths_as_an_array_are_the_last_ones() -> None:
    history = History()
    assert history.column(3).tolist() == []
    for epoch, lengths in enumerate(((5, 7), (9, 2, 4)), 1):
        prompt = PromptLoad(3, 10, lengths)
        history.note(epoch, StepLoad(epoch, (prompt,)), prompt)
        assert history.column(3).tolist() == list(history.lengths(3)) == list(lengths)
