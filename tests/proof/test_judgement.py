"""Judgement of log-probabilities with drafts: the bound, and faults."""

from __future__ import annotations

import math

import pytest

from rhyme_openrlhf.engine.messages import Answer
from rhyme_openrlhf.proof.judgement import STEADY, Bound, Difference, bound, difference, fault, never_drafted, unsteady

PLAIN = Answer((1, 2, 3, 4), (-1.0, -2.0, -3.0, -4.0))
ALLOWED = Bound(0.1, 0.5)


def test_responses_are_compared_up_to_the_first_other_token_that_place_included() -> None:
    other = Answer((1, 2, 9, 4), (-1.5, -2.0, -3.25, 0.0))
    assert difference([(PLAIN, other)]) == Difference(4, 3, 0.25, 0.5)
    longer = Answer((*PLAIN.tokens, 5), (*PLAIN.log_probs, -7.0))
    assert difference([(PLAIN, PLAIN), (PLAIN, longer)]) == Difference(8, 8, 0.0, 0.0)
    assert difference([]) == Difference(0, 0, 0.0, 0.0)


def test_a_token_that_the_model_did_not_find_likeliest_is_seen_by_its_log_probability() -> None:
    accepted_wrongly = Answer((1, 9), (-1.0, -11.0))
    assert fault("x", difference([(PLAIN, accepted_wrongly)]), ALLOWED)


@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_what_is_no_number_is_a_fault_whatever_is_allowed(nothing: float) -> None:
    found = difference([(PLAIN, Answer(PLAIN.tokens, (-1.0, nothing, -3.0, -4.0)))])
    assert "differ by inf" in fault("x", found, Bound(100.0, 100.0))
    # Nor is it where batch sizes do so already.
    assert unsteady(found)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Difference(100, 100, 0.1, 0.5), ""),
        (Difference(100, 100, 0.11, 0.11), "x, log-probabilities differ by 0.11 on average and 0.11 at most"),
        (Difference(100, 100, 0.0, 0.6), "another batch size allows 0.1 and 0.5"),
        (Difference(100, 24, 0.0, 0.0), "x, only 24 of 100 tokens are those that were said without drafts"),
    ],
)
def test_faults(found: Difference, why: str) -> None:
    said = fault("x", found, ALLOWED)
    assert why in said and bool(said) == bool(why)


def test_the_bound_follows_what_batch_sizes_change_and_never_asks_for_more_than_the_format_has() -> None:
    sixteen, exact = 2**-7, 2**-23
    assert bound(Difference(9, 9, 0.0, 0.0), sixteen) == Bound(8 * sixteen, 32 * sixteen)
    assert bound(Difference(9, 9, 0.03, 0.3), sixteen) == Bound(pytest.approx(0.09), pytest.approx(1.2))
    assert bound(Difference(9, 9, 1e-5, 1e-4), exact) == Bound(pytest.approx(3e-5), pytest.approx(4e-4))
    assert unsteady(Difference(9, 9, STEADY, 3.0)) == "" and "on average" in unsteady(Difference(9, 9, 0.11, 0.2))


def test_a_history_of_which_nothing_was_verified_or_nothing_right_accepted_tests_nothing() -> None:
    assert never_drafted("stale", 5, 0, ("right",)) == never_drafted("right", 5, 1, ("right",)) == ""
    assert "no draft was verified" in never_drafted("stale", 0, 0, ("right",))
    assert "none of 5 right drafts" in never_drafted("right", 5, 0, ("right",))
