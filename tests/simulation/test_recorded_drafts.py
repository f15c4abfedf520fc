"""How samples drafted, from what a run kept of their responses."""

from __future__ import annotations

from typing import Any

import pytest

from rhyme_openrlhf.simulation.recorded_drafts import drafting_of_step, from_hits, from_record
from rhyme_openrlhf.simulation.speculation_rates import Rates
from rhyme_openrlhf.simulation.workload import Drafting, PromptLoad


def record(pieces: list[list[str]], tokens: int, accepted: int, drafted: int | None) -> dict[str, Any]:
    return {"pieces": pieces, "tokens": tokens, "accepted": accepted, "drafted": drafted, "cut": False}


def steps(drafting: Drafting, length: int) -> float:
    ends = [part[0] for part in drafting[1:]] + [float(length)]
    return sum((end - begin) / gained for (begin, gained, _), end in zip(drafting, ends, strict=True))


def test_a_response_that_drafts_well_at_first_only() -> None:
    """Half of it drafted at 5 tokens a step, the other half the model's own."""
    head = [[source, text] for _ in range(10) for source, text in (("", "x"), ("history", "y" * 4))]
    found = from_record(record([*head, ["", "z" * 50]], 100, 40, 60))
    assert [gained for _, gained, _ in found] == pytest.approx([5.0, 5.0, 1.0, 1.0], rel=0.02)
    # The first token is the prefill's.
    assert steps(found, 100) == pytest.approx(100 - 40 - 1, rel=0.03)


def test_nothing_noted_is_nothing_known() -> None:
    assert from_record(record([["", "abc"]], 3, 0, None)) == ()
    assert from_record({**record([["", "abc"]], 3, 0, 0), "cut": True}) == ()


def test_what_was_not_kept_drafts_as_its_neighbour_and_the_step_comes_out() -> None:
    """Two of three responses were kept; the third's steps are what is missing of the step's."""
    prompts = [PromptLoad(0, 10, (41, 100)), PromptLoad(1, 10, (90,))]
    kept = {
        "a": [
            record([["", "x" * 10], ["own", "y" * 31]], 41, 31, 40),
            record([["", "x" * 50], ["history", "y" * 50]], 100, 50, 50),
        ]
    }
    known = 9 + 49
    missing = 60
    rates = Rates((40 + 99 + 89) / (known + missing), 1.0, 4.0)
    found = drafting_of_step(prompts, ["a", "b"], kept, rates)
    assert [len(prompt.drafting) for prompt in found] == [2, 1]
    total = sum(
        steps(drafting, length)
        for prompt in found
        for drafting, length in zip(prompt.drafting, prompt.lengths, strict=True)
    )
    assert total == pytest.approx(known + missing, rel=0.03)
    # The one of 90 tokens drafts as that of 100: well at its end.
    (borrowed,) = found[1].drafting
    assert borrowed[0][1] < borrowed[-1][1]


def test_without_kept_responses_prompts_stay_as_they_are() -> None:
    prompts = (PromptLoad(0, 10, (41,)),)
    assert drafting_of_step(prompts, ["a"], {}, Rates(2.0, 1.0, 2.0)) == prompts


def test_hits_that_do_not_make_the_response_are_refused() -> None:
    with pytest.raises(ValueError, match="hits make 3 tokens"):
        from_hits([1, 0], 5)
