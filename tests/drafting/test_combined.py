"""Drafts from history and from a model together: which one a sample gets, and when the model's passes run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.combined import FEWEST_STEPS, TRIED_AFTER, HistoryAndModel, PassRule, worth
from rhyme_openrlhf.drafting.source import Verified
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.latency import formula

TOKENS = 4
RESPONSE = list(range(100, 900))
PROPOSAL = [11, 12, 13, 14]
MODEL = "draft_model"


def source(planned: bool = False, samples: int = 2) -> HistoryAndModel:
    """A source whose sample "0" has a history that goes on as RESPONSE; the others have none."""
    made = HistoryAndModel(
        HistoSpecSettings(own_output=False, siblings=False, shared_tokens=0), MODEL, TOKENS, timed=False
    )
    made.install("known", build_index([Piece([], RESPONSE, 1.0)]))
    for number in range(samples):
        made.start(str(number), "unknown" if number else "known", RESPONSE[:3], 1, 2000)
    if planned:
        made.plan_by(Predictor(StepModel(formula.profile())))
    return made


def step(made: HistoryAndModel, names: list[str], most: int | None = None) -> list[list[int]]:
    """Draft for these samples, for each of which PROPOSAL is proposed where the source wants it."""
    made.proposed(names, [PROPOSAL if made.wants_proposals else [] for _ in names])
    drafts = made.draft(names, 100, most)
    made.computing()
    return drafts


@pytest.mark.parametrize("planned", [False, True])
def test_history_serves_where_it_matches_and_the_model_elsewhere(planned: bool) -> None:
    """History is always right, and the model in two tokens of four; both have to be learnt."""
    made, names = source(planned), ["0", "1"]
    at, last = 3, ["", ""]
    for _ in range(60):
        drafts = step(made, names)
        right = [RESPONSE[at : at + TOKENS + 60], [*PROPOSAL[:2], 99]]
        hits = [beginning(draft, text) for draft, text in zip(drafts, right, strict=True)]
        used = [number for number in (0, 1) if drafts[number]]
        lengths, accepted = [len(drafts[number]) for number in used], [hits[number] for number in used]
        came = made.verified(Verified.of([names[number] for number in used], lengths, accepted))
        assert sum(came.accepted) == sum(accepted)
        for number, which in zip(used, came.sources, strict=True):
            last[number] = made.names[which]
        made.append(names, [right[number][: hits[number] + 1] for number in (0, 1)])
        at += hits[0] + 1
        if at > len(RESPONSE) - 100:
            made.finish("0")
            made.start("0", "known", RESPONSE[:3], 1, 2000)
            at = 3
    assert last == ["history", MODEL]


def beginning(draft: list[int], text: list[int]) -> int:
    """The number of first tokens that two lists have in common."""
    return next((n for n, (one, other) in enumerate(zip(draft, text, strict=False)) if one != other), len(draft))


def test_passes_are_skipped_where_history_serves_all() -> None:
    made = source(samples=1)
    made._acceptance.history.table[:] = 0.99
    step(made, ["0"])
    assert not made.wants_proposals
    made.start("1", "unknown", [1, 2], 1, 640)
    step(made, ["0", "1"])
    assert made.wants_proposals


def test_dummies_of_a_step_without_passes_are_no_proposals() -> None:
    made = source()
    made.proposed(["1"], [[0] * 32])
    assert made.draft(["1"]) == [[]]


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=6), st.integers(0, 12), st.booleans())
def test_drafts_are_cut_beginnings_within_the_step(sizes: list[int], most: int, planned: bool) -> None:
    made = source(planned, len(sizes))
    names = [str(number) for number in range(len(sizes))]
    made.proposed(names, [PROPOSAL[:size] for size in sizes])
    drafts = made.draft(names, 100, most)
    assert sum(map(len, drafts)) <= most
    for number, draft in enumerate(drafts):
        begins = draft == PROPOSAL[: min(len(draft), sizes[number])]
        assert begins or (number == 0 and draft == RESPONSE[3 : 3 + len(draft)])


def test_a_tokens_price_takes_what_is_not_worth_it() -> None:
    likely = np.array([[0.5, 0.5, 0.5], [0.9, 0.9, 0.9]], np.float32)
    lengths = np.array([3, 2])
    assert worth(likely, lengths, 0.0).tolist() == pytest.approx([0.875, 1.71])
    assert worth(likely, lengths, 0.3).tolist() == pytest.approx([0.2, 1.11])


def rule_with(without: float, with_passes: float) -> PassRule:
    made = PassRule(timed=True)
    for _ in range(FEWEST_STEPS):
        made.took(False, 8, without)
        made.took(True, 8, with_passes)
    return made


def test_passes_run_where_they_give_more_tokens_a_second() -> None:
    """8 samples with 2 tokens from history; the passes give 5 more, which is 1.5 times as many."""
    assert rule_with(0.010, 0.014).runs(8, 2.0, 5.0)
    assert not rule_with(0.010, 0.016).runs(8, 2.0, 5.0)


def test_the_other_kind_of_step_is_tried_now_and_then() -> None:
    made = rule_with(0.010, 0.020)
    ran = [made.runs(8, 2.0, 5.0) for _ in range(3 * (TRIED_AFTER + 1))]
    assert sum(ran) == 3


def test_both_kinds_of_steps_are_seen_first() -> None:
    made = PassRule(timed=True)
    kinds = []
    for _ in range(2 * FEWEST_STEPS):
        kinds.append(made.runs(8, 2.0, 5.0))
        made.took(kinds[-1], 8, 0.01)
    assert kinds == [True] * FEWEST_STEPS + [False] * FEWEST_STEPS


def test_without_times_the_passes_always_run() -> None:
    assert PassRule(timed=False).runs(8, 2.0, 0.1)
