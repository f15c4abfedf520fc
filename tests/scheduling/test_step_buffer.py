"""Only whole prompt groups of the step itself, at most one step off policy, get into a batch."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.scheduling.step_buffer import PromptGroup, StepBuffer, StepBufferError


def group(step: int = 5, place: int = 0, samples: int = 2, version: int = 4) -> PromptGroup:
    return PromptGroup(step, place, 3, [f"{place}-{n}" for n in range(samples)], [[version]] * samples)


def test_a_batch_is_in_the_order_in_which_prompt_groups_ended() -> None:
    buffer = StepBuffer(5, 2)
    for place in (2, 0, 1):
        buffer.add(group(place=place, version=3 + place % 2))
    assert buffer.complete(5, 3) == ["2-0", "2-1", "0-0", "0-1", "1-0", "1-1"]
    buffer.add(group(step=6, version=5))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (group(step=6), "step 6 came while step 5"),
        (group(place=0), "came twice"),
        (group(place=3), "none of the step's 3"),
        (group(place=1, samples=1), "1 samples instead of 2"),
        (group(place=1, version=2), "version 2: 2 steps off policy"),
        (group(place=1, version=5), "-1 steps off policy"),
    ],
)
def test_what_does_not_belong_into_a_batch_is_refused(wrong: PromptGroup, says: str) -> None:
    buffer = StepBuffer(5, 2)
    buffer.add(group())
    with pytest.raises(StepBufferError, match=says):
        buffer.add(wrong)


def test_a_conversation_may_span_only_allowed_weights() -> None:
    buffer = StepBuffer(5, 1)
    with pytest.raises(StepBufferError, match="version 2"):
        buffer.add(PromptGroup(5, 0, 1, ["a"], [[4, 2]]))


def test_a_step_is_complete_with_all_its_prompt_groups() -> None:
    buffer = StepBuffer(5, 2)
    buffer.add(group())
    with pytest.raises(StepBufferError, match="only 1 of 3"):
        buffer.complete(5, 3)
