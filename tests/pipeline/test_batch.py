"""A batch takes only whole prompt groups of its own step, at most one step off policy."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.pipeline.batch import EXCHANGED, BatchError, Batches, PromptGroup


def group(step: int = 5, place: int = 0, samples: int = 2, version: int = 4, trained: int = 0) -> PromptGroup:
    made = [f"{place}-{n}" for n in range(samples)]
    return PromptGroup(step, place, 3, made, [[version]] * samples, trained or step, 3)


def test_a_batch_is_in_the_order_in_which_prompt_groups_ended() -> None:
    batches = Batches(5, 2)
    for place in (2, 0, 1):
        batches.add(group(place=place, version=3 + place % 2))
    assert batches.complete(5, 3) == ["2-0", "2-1", "0-0", "0-1", "1-0", "1-1"]
    batches.add(group(step=6, version=5))


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
    batches = Batches(5, 2)
    batches.add(group())
    with pytest.raises(BatchError, match=says):
        batches.add(wrong)


def test_a_conversation_may_span_only_allowed_weights() -> None:
    batches = Batches(5, 1)
    with pytest.raises(BatchError, match="version 2"):
        batches.add(PromptGroup(5, 0, 1, ["a"], [[4, 2]], 5, 1))


def test_a_step_is_complete_with_all_its_prompt_groups() -> None:
    batches = Batches(5, 2)
    batches.add(group())
    with pytest.raises(BatchError, match="only 1 of 3"):
        batches.complete(5, 3)


def test_a_deferred_prompt_group_may_be_older_by_one_step_and_comes_once() -> None:
    batches = Batches(5, 2, late=EXCHANGED)
    batches.add(group(place=0))
    batches.add(group(place=1))
    # In exchange for the one that is late.
    batches.add(group(step=6, place=2, version=3, trained=5))
    batches.complete(5, 3)
    batches.add(group(step=5, place=2, version=3, trained=6))
    batches.add(group(step=6, place=0, version=5))
    for wrong, says in (
        (group(step=6, place=2, version=5), "came twice"),
        (group(step=5, place=0, trained=6), "came twice"),
        (group(step=6, place=1, version=3), "2 steps off policy, where 0 to 1"),
        (group(step=6, place=1, version=4, trained=5), "while step 6 is collected"),
        (group(step=4, place=1, trained=6), "while step 6 is collected"),
    ):
        with pytest.raises(BatchError, match=says):
            batches.add(wrong)
    batches.add(group(step=6, place=1, version=4))
    assert len(batches.complete(6, 3)) == 6
    with pytest.raises(BatchError, match="while step 5"):
        Batches(5, 2).add(group(step=4, trained=5))
