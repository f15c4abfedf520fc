"""The planner: what it cuts follows step times and what became of earlier drafts."""

from __future__ import annotations

import numpy as np
import pytest

from rhyme_openrlhf.drafting.acceptance import FIRST_RECENT, PRIOR
from rhyme_openrlhf.drafting.budget import TRIED_AFTER
from rhyme_openrlhf.drafting.planner import REFIT_TOKENS, Cut, Decision, DecisionLog, Drafts
from tests.drafting.planners import planner

CONTEXT = 1000
MANY = 10_000


def drafts(lengths: list[int], confidence: float = 1.0) -> Drafts:
    tokens, count = sum(lengths), len(lengths)
    return Drafts(
        flat=np.arange(tokens, dtype=np.int32),
        confidences=np.full(tokens, confidence, dtype=np.float32),
        lengths=np.array(lengths, dtype=np.int64),
        sources=np.ones(count, dtype=np.int64),
        matches=np.full(count, 4),
        recents=np.full(count, FIRST_RECENT),
    )


def lengths(cut: tuple[Cut, Decision]) -> list[int]:
    return [len(tokens) for tokens in cut[0].tokens()]


def test_drafts_that_cost_nothing_are_verified_whole() -> None:
    taken, decision = planner(0.0).cut(drafts([3, 5, 0]), 4, CONTEXT, MANY)
    assert taken.tokens() == [[0, 1, 2], [3, 4, 5, 6, 7], []]
    assert (decision.running, decision.context, decision.drafts) == (4, CONTEXT, 8)
    first = PRIOR[-1]
    expected = sum(first**n for n in (1, 2, 3)) + sum(first**n for n in (1, 2, 3, 4, 5))
    assert decision.expected_accepted == pytest.approx(expected, rel=0.01)
    assert decision.seconds == pytest.approx(0.010)


def test_drafts_that_cost_too_much_are_not() -> None:
    taken, decision = planner(200.0).cut(drafts([3, 5]), 2, CONTEXT, MANY)
    assert taken.tokens() == [[], []] and decision.drafts == 0 and decision.expected_accepted == 0


def test_no_more_than_fit_into_the_step() -> None:
    assert sum(lengths(planner(0.0).cut(drafts([3, 5]), 2, CONTEXT, 4))) == 4
    assert planner(0.0).cut(drafts([3, 5]), 2, CONTEXT, 0)[0].tokens() == [[], []]


def test_a_step_without_drafts_is_decided_too() -> None:
    taken, decision = planner(0.1).cut(drafts([]), 3, CONTEXT, MANY)
    assert taken.tokens() == [] and decision.drafts == 0 and decision.seconds > 0.010


def test_rejections_make_drafts_shorter_and_a_new_policy_forgets_them() -> None:
    asked, proposal = planner(3.0), drafts([8])
    before = sum(lengths(asked.cut(proposal, 1, CONTEXT, MANY)))
    for _ in range(2 * REFIT_TOKENS // before):
        asked.cut(proposal, 1, CONTEXT, MANY)
        asked.learn(np.array([0]), np.array([before]), np.array([0]))
        asked.computing()
    after = sum(lengths(asked.cut(proposal, 1, CONTEXT, MANY)))
    assert after < before
    for _ in range(12):
        asked.policy_updated()
    assert sum(lengths(asked.cut(proposal, 1, CONTEXT, MANY))) == before


def test_step_times_that_were_measured_move_the_next_decision() -> None:
    asked = planner(0.0)
    for _ in range(400):
        asked.took(2, CONTEXT, 0, 0.010)
        asked.took(2, CONTEXT, 8, 0.080)
    assert sum(lengths(asked.cut(drafts([4, 4]), 2, CONTEXT, MANY))) < 8


def test_a_step_that_was_prepared_is_decided_alike() -> None:
    plain, prepared = planner(1.0), planner(1.0)
    for sizes, context, most in (([4, 4], CONTEXT, MANY), ([8], 2 * CONTEXT, 3), ([], CONTEXT, MANY)):
        prepared.prepare(2, context, most)
        assert prepared.cut(drafts(sizes), 2, context, most)[1] == plain.cut(drafts(sizes), 2, context, most)[1]
    # Prepared for another step, or for fewer tokens.
    prepared.prepare(2, CONTEXT, 1)
    for running, context in ((1, CONTEXT), (2, 2 * CONTEXT), (2, CONTEXT)):
        asked = drafts([4]), running, context, MANY
        assert prepared.cut(*asked)[1] == plain.cut(*asked)[1]


def test_the_log_sums_decisions_by_running_samples_and_begins_anew() -> None:
    log = DecisionLog()
    log.add(Decision(4, 100, 8, 5.0, 0.010), 0.012, 6)
    log.add(Decision(4, 104, 4, 3.0, 0.012), 0.010, 2)
    log.add(Decision(1, 20, 0, 0.0, 0.005), 0.005, 0)
    taken = log.take()
    assert taken["running"] == [1, 4] and taken["decode_steps"] == [1, 2]
    assert taken["draft_length"] == pytest.approx([0, 1.5])
    assert taken["predicted_ms"] == pytest.approx([5, 11]) and taken["real_ms"] == pytest.approx([5, 11])
    assert taken["expected_accepted"] == pytest.approx([0, 4]) and taken["accepted"] == pytest.approx([0, 4])
    assert log.take()["running"] == []


def test_where_nothing_is_worth_it_a_beginning_is_tried_now_and_then() -> None:
    dear = planner(1000.0)
    proposed = [3, 5, 0]
    totals = [dear.cut(drafts(proposed), 64, CONTEXT, MANY)[1].drafts for _ in range(3 * (TRIED_AFTER + 1))]
    assert [step for step, total in enumerate(totals, 1) if total] == [17, 34, 51] and set(totals) == {0, 2}
    # Of the longest draft, and never more than there is room for; without a proposal there is nothing to try.
    for _ in range(TRIED_AFTER):
        dear.cut(drafts(proposed), 64, CONTEXT, MANY)
    assert dear.cut(drafts([]), 64, CONTEXT, MANY)[1].drafts == 0
    assert dear.cut(drafts(proposed), 64, CONTEXT, 0)[1].drafts == 0
    cut, decision = dear.cut(drafts(proposed), 64, CONTEXT, 1)
    assert cut.tokens() == [[], [3], []] and decision.expected_accepted == pytest.approx(PRIOR[-1], rel=0.01)


def test_what_was_not_believed_is_learnt() -> None:
    """A row costs a little more than the prior gives: until something is verified, no draft ever is."""
    doubting = planner(0.6)
    assert doubting.cut(drafts([8] * 64), 64, CONTEXT, MANY)[1].drafts == 0
    for _ in range(20_000):
        taken, decision = doubting.cut(drafts([8] * 64), 64, CONTEXT, MANY)
        if decision.drafts > 64:
            break
        verified = np.array([length for length in taken.lengths if length], dtype=np.int64)
        doubting.learn(np.flatnonzero(taken.lengths), verified, verified)
        doubting.computing()
    else:
        pytest.fail("drafts that are always accepted were never verified")
