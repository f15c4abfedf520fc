"""What is verified of drafts that vLLM's own methods propose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.speculation.proposals import ProposalDrafter, ProposalPlanner, Proposed
from tests.latency import formula

TOKENS = 4
MANY = 10_000
DRAFT = [11, 12, 13, 14]


def planner(ms_a_row: float) -> ProposalPlanner:
    """Steps of 10 ms, and so much more for each row."""
    points = tuple(
        StepPoint(b, b * each, b * d, 0.010 + ms_a_row / 1000 * (b + b * d), 0.0, 9)
        for b in (1, 64)
        for each in (16, 1024)
        for d in (0, 1, 31)
    )
    return ProposalPlanner(Predictor(StepModel(formula.profile(steps=points, padded_rows=()))), TOKENS)


def drafter(samples: int, ms_a_row: float | None = None) -> ProposalDrafter:
    made = ProposalDrafter()
    for number in range(samples):
        made.start(str(number))
    if ms_a_row is not None:
        made.plan_with(planner(ms_a_row))
    return made


def proposals(samples: int, room: int = MANY) -> list[Proposed]:
    return [Proposed(str(number), DRAFT, room) for number in range(samples)]


def test_without_a_planner_what_fits_is_verified() -> None:
    made = drafter(2)
    assert made.draft(proposals(2), 100, MANY) == [DRAFT, DRAFT]
    assert made.draft(proposals(2, room=3), 100, MANY) == [DRAFT[:3]] * 2
    assert made.draft(proposals(2, room=-1), 100, MANY) == [[], []]
    # Seven tokens fit into the step: three for each.
    assert made.draft(proposals(2), 100, 7) == [DRAFT[:3]] * 2
    assert made.draft([], 0, MANY) == []
    assert made.decision is None


def test_drafts_that_cost_nothing_are_verified_whole_and_dear_ones_not_at_all() -> None:
    assert drafter(3, 0.0).draft(proposals(3), 300, MANY) == [DRAFT] * 3
    dear = drafter(3, 100.0)
    assert dear.draft(proposals(3), 300, MANY) == [[]] * 3
    assert dear.decision is not None and (dear.decision.running, dear.decision.drafts) == (3, 0)


def test_what_is_never_accepted_is_soon_not_verified() -> None:
    made = drafter(4, 1.0)
    assert any(made.draft(proposals(4), 400, MANY))
    for _ in range(300):
        drafts = made.draft(proposals(4), 400, MANY)
        for number, draft in enumerate(drafts):
            made.record(str(number), len(draft), 0)
    assert made.draft(proposals(4), 400, MANY) == [[]] * 4


def test_samples_whose_drafts_are_accepted_get_more_of_the_budget() -> None:
    made = drafter(2, 2.5)
    for _ in range(300):
        for number, draft in enumerate(made.draft(proposals(2), 200, MANY)):
            made.record(str(number), len(draft), len(draft) if number == 0 else 0)
    lengths = [len(draft) for draft in made.draft(proposals(2), 200, MANY)]
    assert lengths[0] == TOKENS and lengths[1] < TOKENS


def test_new_weights_make_it_doubt() -> None:
    plan = planner(1.0)
    made = ProposalDrafter()
    made.start("0")
    made.plan_with(plan)
    for _ in range(200):
        made.record("0", TOKENS, TOKENS)
        made.draft(proposals(1), 100, MANY)
    sure = plan.cut([1000], [TOKENS], 1, 100, MANY)[1].expected_accepted
    for _ in range(6):
        plan.policy_updated()
    assert plan.cut([1000], [TOKENS], 1, 100, MANY)[1].expected_accepted < sure


def test_bad_questions() -> None:
    made = drafter(1)
    with pytest.raises(ValueError, match="has started already"):
        made.start("0")
    with pytest.raises(ValueError, match="need 0 <= accepted <= drafted"):
        made.record("0", 2, 3)
    made.finish("0")
    with pytest.raises(KeyError):
        made.finish("0")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, TOKENS), st.integers(-1, TOKENS)), max_size=12),
    st.integers(0, 20),
    st.sampled_from([None, 0.0, 0.5, 5.0]),
)
def test_a_draft_is_a_beginning_of_its_proposal_and_fits(
    samples: list[tuple[int, int]], most: int, ms_a_row: float | None
) -> None:
    made = drafter(len(samples), ms_a_row)
    asked = [Proposed(str(number), DRAFT[:size], room) for number, (size, room) in enumerate(samples)]
    drafts = made.draft(asked, 50 * len(samples), most)
    assert len(drafts) == len(samples) and sum(map(len, drafts)) <= most
    for draft, sample in zip(drafts, asked, strict=True):
        assert draft == sample.tokens[: len(draft)] and len(draft) <= max(sample.room, 0)
