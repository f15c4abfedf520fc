"""What is verified of drafts that vLLM's own methods propose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.acceptance import classes_of_recent
from rhyme_openrlhf.drafting.budget import TRIED_AFTER
from rhyme_openrlhf.drafting.vllm_methods import (
    _CLASSES,
    LEAST_GAIN,
    LOOKED_FOR,
    LOOKS_AGAIN,
    SETTLED_TOKENS,
    Fates,
    ProposalDrafter,
    ProposalPlanner,
    Proposed,
)
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from tests.examples import examples
from tests.latency import formula

TOKENS = 4
MANY = 1_000_000
DRAFT = [11, 12, 13, 14]


def planner(ms_a_row: float, ms_to_verify: float = 0.0) -> ProposalPlanner:
    """Steps of 10 ms, so much more for each row, and so much more if anything is verified."""
    points = tuple(
        StepPoint(b, b * each, b * d, 0.010 + ms_a_row / 1000 * (b + b * d) + (d > 0) * ms_to_verify / 1000, 0.0, 9)
        for b in (1, 64)
        for each in (16, 1024)
        for d in (0, 1, 31)
    )
    return ProposalPlanner(Predictor(StepModel(formula.profile(steps=points, padded_rows=()))), TOKENS)


def drafter(
    samples: int, ms_a_row: float | None = None, ms_to_verify: float = 0.0, room: int = MANY
) -> ProposalDrafter:
    """`room`: draft tokens that fit into each sample behind its first token."""
    made = ProposalDrafter()
    for number in range(samples):
        made.start(str(number), room + 2)
    if ms_a_row is not None:
        made.plan_with(planner(ms_a_row, ms_to_verify))
    return made


def proposals(samples: int) -> list[Proposed]:
    return [Proposed(str(number), DRAFT, [1]) for number in range(samples)]


class Samples:
    """Samples for which DRAFT is always proposed, and that go on with its first tokens, and then another one."""

    def __init__(self, made: ProposalDrafter, right: list[int]) -> None:
        """`right`: of each sample, how many tokens of DRAFT it would go on with."""
        self._made, self.right = made, right
        self._texts: list[list[int]] = [[1] for _ in right]

    def step(self, held: bool = False) -> list[list[int]]:
        """`held`: by the plan that holds."""
        asked = [Proposed(str(number), DRAFT, text) for number, text in enumerate(self._texts)]
        drafts = self._made.draft_held(asked, len(asked), MANY) if held else self._made.draft(asked, 100, MANY)
        for text, draft, right in zip(self._texts, drafts, self.right, strict=True):
            # What is verified, and the token behind it.
            text += (DRAFT[:right] + [0])[: min(len(draft), right) + 1]
        return drafts

    def steps(self, count: int) -> list[list[int]]:
        for _ in range(count):
            drafts = self.step()
        return drafts

    def become(self, right: int) -> None:
        """From now on every sample goes on with so many tokens of DRAFT."""
        self.right = [right] * len(self.right)


def test_without_a_planner_what_fits_is_verified() -> None:
    made = drafter(2)
    assert made.draft(proposals(2), 100, MANY) == [DRAFT, DRAFT]
    assert drafter(2, room=3).draft(proposals(2), 100, MANY) == [DRAFT[:3]] * 2
    assert drafter(2, room=-1).draft(proposals(2), 100, MANY) == [[], []]
    # Seven tokens fit into the step: three for each, and one more.
    assert made.draft(proposals(2), 100, 7) == [DRAFT[:4], DRAFT[:3]]
    assert made.draft([], 0, MANY) == []
    assert made.decision is None


def test_drafts_that_cost_nothing_are_verified_whole_and_dear_ones_not_at_all() -> None:
    assert drafter(3, 0.0).draft(proposals(3), 300, MANY) == [DRAFT] * 3
    dear = drafter(3, 100.0)
    assert dear.draft(proposals(3), 300, MANY) == [[]] * 3
    assert dear.decision is not None and (dear.decision.running, dear.decision.drafts) == (3, 0)


def test_what_is_never_accepted_is_soon_not_verified() -> None:
    made = drafter(4, 1.0)
    samples = Samples(made, [0] * 4)
    assert any(samples.step())
    assert samples.steps(300) == [[]] * 4


def test_samples_whose_drafts_are_accepted_get_more_of_the_budget() -> None:
    lengths = list(map(len, Samples(drafter(2, 2.5), [TOKENS, 0]).steps(300)))
    assert lengths[0] == TOKENS and lengths[1] < TOKENS


def test_proposals_that_become_right_are_noticed_while_nothing_is_verified() -> None:
    samples = Samples(drafter(4, 1.0), [0] * 4)
    assert samples.steps(300) == [[]] * 4
    samples.right[0] = TOKENS
    drafts = samples.steps(40)
    assert drafts[0] and drafts[1:] == [[]] * 3


def test_tokens_behind_the_first_are_tried_where_nothing_is_worth_it() -> None:
    """The first token alone does not pay for verifying, so what stands behind it would never be judged again."""
    samples = Samples(drafter(2, 0.0, ms_to_verify=11.0), [1, 1])
    assert all(samples.step())
    samples.steps(200)
    # One right token for each sample is not worth a step of 21 ms instead of 10.
    lengths = [sum(map(len, samples.step())) for _ in range(10 * (TRIED_AFTER + 1))]
    assert set(lengths) == {0, 1} and sum(lengths) == 10
    samples.become(TOKENS)
    samples.steps(2000)
    assert samples.step() == [DRAFT, DRAFT]


def test_a_proposal_is_judged_up_to_the_token_behind_what_was_verified() -> None:
    plan = planner(0.0)
    made = ProposalDrafter()
    made.plan_with(plan)
    made.start("0", MANY)
    learnt: list[Fates] = []
    plan.learn = learnt.append  # type: ignore[method-assign]
    text = [1]
    for most, sampled in ((2, [11, 12, 13]), (2, [11, 9]), (0, [9]), (0, [11]), (4, DRAFT + [9]), (0, [])):
        made.draft([Proposed("0", DRAFT, text)], 100, most)
        text += sampled
    assert [(fates.judged, fates.right) for fates in learnt] == [
        ([3], [3]), ([2], [1]), ([1], [0]), ([1], [1]), ([4], [4]),
    ]  # fmt: skip
    # Left out: nothing was proposed.
    made.leave_out()
    text += [11]
    made.draft([Proposed("0", DRAFT, text)], 100, MANY)
    assert len(learnt) == 5


def test_a_plan_that_holds_verifies_what_it_verified_and_follows_each_sample() -> None:
    # The second sample's drafts are right up to their first token, and a token costs as much as a quarter of a step.
    made = drafter(2, 2.5)
    samples = Samples(made, [TOKENS, 1])
    planned = samples.steps(300)
    assert len(planned[0]) == TOKENS > len(planned[1])
    assert made.decision is not None
    assert made.hold() and made.decision is None
    assert [samples.step(held=True) for _ in range(20)] == [planned] * 20
    # They change places, and the plan need not be made anew for it.
    samples.right = [1, TOKENS]
    for _ in range(20):
        drafts = samples.step(held=True)
    assert drafts == [planned[1], planned[0]]
    # A new sample gets what it would get of a plan.
    made.start("new", MANY)
    new = [Proposed("new", DRAFT, [1])]
    assert made.draft_held(new, 1, MANY) == made.draft(new, 100, MANY)


def test_what_is_judged_while_a_plan_holds_is_learnt_with_the_next() -> None:
    plan = planner(0.0)
    made = drafter(2)
    made.plan_with(plan)
    samples = Samples(made, [TOKENS, 1])
    samples.steps(2)
    learnt: list[Fates] = []
    plan.learn = learnt.append  # type: ignore[method-assign]
    assert made.hold() and "0" in made.waiting and "2" not in made.waiting
    for _ in range(3):
        samples.step(held=True)
    assert not learnt
    samples.step()
    # Four steps of two samples: the one before, and three by the plan.
    assert [(fates.judged, fates.right) for fates in learnt] == [([TOKENS, 2] * 4, [TOKENS, 1] * 4)]


def test_a_plan_that_holds_leaves_out_what_is_not_worth_a_step() -> None:
    """Verifying takes as long as two steps more: drafts of all samples pay for that, those of one do not."""
    made = drafter(4, 0.0, ms_to_verify=20.0)
    samples = Samples(made, [TOKENS] * 4)
    assert samples.steps(300) == [DRAFT] * 4
    assert made.hold()
    alone = [Proposed("0", DRAFT, [1]), *(Proposed(str(number), [], [1]) for number in range(1, 4))]
    assert made.draft_held(alone, 4, MANY) == [[]] * 4 == made.draft(alone, 100, MANY)
    assert made.draft_held(proposals(4), 4, MANY) == [DRAFT] * 4


def test_a_plan_that_holds_keeps_to_the_room_there_is() -> None:
    made = drafter(2, 0.0, room=3)
    samples = Samples(made, [0, 0])
    samples.step()
    assert made.hold()
    assert made.draft_held(proposals(2), 2, MANY) == [DRAFT[:3]] * 2
    assert made.draft_held(proposals(2), 2, 4) == [DRAFT[:3], DRAFT[:1]]


def test_plans_of_many_samples_say_nothing_of_few() -> None:
    """With many running only sure tokens are worth it, with few nearly all."""
    plan = planner(0.3)
    for _ in range(40):
        plan.learn(Fates([1000] * 40, [TOKENS] * 40, [TOKENS] * 36 + [0] * 4))
        plan.learn(Fates([0] * 40, [1] * 40, [1] * 16 + [0] * 24))
    assert plan.cut([1000, 0] * 2, [TOKENS] * 4, 4, 100, MANY)[0][1] > 0
    few = plan.hold().lengths
    assert plan.cut([1000, 0] * 32, [TOKENS] * 64, 64, 6400, MANY)[0] == [TOKENS, 0] * 32
    many = plan.hold().lengths
    assert few[0] > many[0] == 0
    # Nothing is proposed in the first steps of few, so that their plan says nothing.
    plan.cut([1000], [0], 4, 100, MANY)
    assert plan.hold().lengths == few


def test_drafts_must_be_worth_more_than_a_little() -> None:
    """Four samples, of whose drafts all is accepted, in steps that verifying makes longer by nearly as much."""
    for gain, verified in ((LEAST_GAIN - 0.01, False), (LEAST_GAIN + 0.01, True)):
        plan = planner(0.0, ms_to_verify=10.0 * ((1 + TOKENS) / gain - 1))
        for _ in range(400):
            plan.learn(Fates([1000] * 40, [TOKENS] * 40, [TOKENS] * 40))
        drafts, decision = plan.cut([1000] * 4, [TOKENS] * 4, 4, 100, MANY)
        assert any(drafts) == plan.worth == verified
        # What the step is expected to take is not what the choice was made by.
        assert decision.seconds == plan.predictor.step_seconds(4, 100, decision.drafts)


def test_classes_of_recent_acceptance_are_those_of_the_table() -> None:
    assert classes_of_recent(np.arange(1001)).tolist() == _CLASSES


def test_a_plan_of_few_tokens_forgets_nothing_of_where_the_boundary_lies() -> None:
    """A sample with a sure token and a hopeless one says nothing of a token that is right half the time."""
    plan = planner(2.5)
    for _ in range(10):
        plan.learn(Fates([1000] * 40, [2] * 40, [1] * 39 + [0]))
        plan.learn(Fates([0] * 40, [1] * 40, [1] * 22 + [0] * 18))
    both, _ = plan.cut([1000, 0], [2, 2], 2, 100, MANY)
    assert both == [1, 1]
    held = plan.hold().lengths
    assert [held[number] for number in classes_of_recent(np.array([1000, 0]))] == [1, 1]
    for _ in range(3):
        assert plan.cut([1000], [2], 1, 100, MANY)[0] == [1]
        assert plan.hold().lengths == held
    # Nor does a short proposal that is verified whole.
    assert plan.cut([1000], [1], 1, 100, MANY)[0] == [1]
    assert plan.hold().lengths == held


def test_no_plan_holds_before_enough_was_judged() -> None:
    plan = planner(1.0)
    judged = 0
    while judged < SETTLED_TOKENS:
        assert not plan.settled
        plan.learn(Fates([500] * 20, [TOKENS] * 20, [1] * 20))
        judged += 20 * TOKENS
    assert plan.settled


def test_where_nothing_was_worth_it_for_long_most_plans_that_hold_need_no_proposals() -> None:
    made = drafter(2, 0.0, ms_to_verify=20.0)
    samples = Samples(made, [0, 0])
    samples.steps(300 + LOOKED_FOR // 2)
    looked, verified = [], 0
    for _ in range(2 * (TRIED_AFTER + 1)):
        # Also behind a step that only tried.
        verified += sum(map(len, samples.step()))
        looked.append(made.hold())
        if looked[-1]:
            assert samples.step(held=True) == [[], []]
    assert [number for number, each in enumerate(looked, 1) if each] == [*range(4, len(looked) + 1, 4)]
    assert verified == 2
    # Once something is, all are needed again.
    samples.become(TOKENS)
    samples.steps(2000)
    assert any(samples.step())
    assert [made.hold() for _ in range(LOOKS_AGAIN)] == [True] * LOOKS_AGAIN


def test_where_few_samples_are_left_proposals_are_looked_at_anew() -> None:
    made = drafter(8, 0.0, ms_to_verify=20.0)
    Samples(made, [0] * 8).steps(300 + LOOKED_FOR // 8)
    assert not made.hold()
    # About as many.
    made.draft(proposals(5), 100, MANY)
    assert not made.hold()
    made.draft(proposals(3), 100, MANY)
    assert made.hold()


def test_new_weights_make_it_doubt() -> None:
    plan = planner(1.0)
    made = ProposalDrafter()
    made.start("0", MANY)
    made.plan_with(plan)
    Samples(made, [TOKENS]).steps(200)
    sure = plan.cut([1000], [TOKENS], 1, 100, MANY)[1].expected_accepted
    for _ in range(6):
        plan.policy_updated()
    assert plan.cut([1000], [TOKENS], 1, 100, MANY)[1].expected_accepted < sure


def test_bad_questions() -> None:
    made = drafter(1)
    with pytest.raises(ValueError, match="has started already"):
        made.start("0", MANY)
    made.finish("0")
    with pytest.raises(KeyError):
        made.finish("0")


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, TOKENS), st.integers(-1, TOKENS)), max_size=12),
    st.integers(0, 20),
    st.sampled_from([None, 0.0, 0.5, 5.0]),
)
def test_a_draft_is_a_beginning_of_its_proposal_and_fits(
    samples: list[tuple[int, int]], most: int, ms_a_row: float | None
) -> None:
    made = drafter(0, ms_a_row)
    for number, (_, room) in enumerate(samples):
        made.start(str(number), room + 2)
    asked = [Proposed(str(number), DRAFT[:size], [1]) for number, (size, _) in enumerate(samples)]
    ways = [made.draft(asked, 50 * len(samples), most)]
    if ms_a_row is not None:
        made.hold()
        ways.append(made.draft_held(asked, len(asked), most))
    for drafts in ways:
        assert len(drafts) == len(samples) and sum(map(len, drafts)) <= most
        for draft, (size, room) in zip(drafts, samples, strict=True):
            assert draft == DRAFT[: len(draft)] and len(draft) <= min(size, max(room, 0))
