"""Verification of drafts that come as bare tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.budget import TRIED_AFTER
from rhyme_openrlhf.drafting.source import LEAST_GAIN, Fates, ProposalPlanner, Verified, WorkerProposals
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from tests.examples import examples
from tests.latency import formula

TOKENS = 4
MANY = 1_000_000
DRAFT = [11, 12, 13, 14]


def planner(ms_a_row: float, ms_to_verify: float = 0.0) -> ProposalPlanner:
    """A planner for steps of 10 ms, `ms_a_row` for each row, and `ms_to_verify` if anything is verified."""
    points = tuple(
        StepPoint(b, b * each, b * d, 0.010 + ms_a_row / 1000 * (b + b * d) + (d > 0) * ms_to_verify / 1000, 0.0, 9)
        for b in (1, 64)
        for each in (16, 1024)
        for d in (0, 1, 31)
    )
    return ProposalPlanner(Predictor(StepModel(formula.profile(steps=points, padded_rows=()))), TOKENS)


class Drafter(WorkerProposals):
    """Drafts for samples that begin with one token, and for which DRAFT is proposed."""

    def __init__(self, samples: int, plan: ProposalPlanner | None = None, room: int = MANY) -> None:
        """`room`: draft tokens that fit into each sample behind its first token."""
        super().__init__("ngram", TOKENS)
        self.planner = plan
        for number in range(samples):
            self.begin(number, room)

    def begin(self, number: int, room: int = MANY) -> None:
        self.start(str(number), None, [1], 1, room + 2)

    def drafts(self, samples: int, context: int, most: int, sizes: Sequence[int] = ()) -> list[list[int]]:
        """Return the drafts for the first samples; `sizes`: tokens of DRAFT that are proposed for each."""
        names = [str(number) for number in range(samples)]
        self.proposed(names, [DRAFT[:size] for size in sizes or [TOKENS] * samples])
        found = self.draft(names, context, most)
        self.computing()
        return found


def drafter(samples: int, ms_a_row: float, ms_to_verify: float = 0.0) -> Drafter:
    return Drafter(samples, planner(ms_a_row, ms_to_verify))


class Samples:
    """Samples for which DRAFT is always proposed, and that go on with its first tokens, and then another one."""

    def __init__(self, made: Drafter, right: list[int]) -> None:
        """`right`: of each sample, how many tokens of DRAFT it would go on with."""
        self._made, self.right = made, right

    def step(self) -> list[list[int]]:
        drafts = self._made.drafts(len(self.right), 100, MANY)
        # What is verified, and the token behind it.
        new = [
            (DRAFT[:right] + [0])[: min(len(draft), right) + 1] for draft, right in zip(drafts, self.right, strict=True)
        ]
        self._made.append([str(number) for number in range(len(new))], new)
        return drafts

    def steps(self, count: int) -> list[list[int]]:
        for _ in range(count):
            drafts = self.step()
        return drafts

    def become(self, right: int) -> None:
        """Let every sample continue with the first `right` tokens of DRAFT from now on."""
        self.right = [right] * len(self.right)


def test_without_a_planner_what_fits_is_verified() -> None:
    made = Drafter(2)
    assert made.drafts(2, 100, MANY) == [DRAFT, DRAFT]
    assert Drafter(2, room=3).drafts(2, 100, MANY) == [DRAFT[:3]] * 2
    assert Drafter(2, room=-1).drafts(2, 100, MANY) == [[], []]
    # Seven tokens fit into the step: three for each, and one more.
    assert made.drafts(2, 100, 7) == [DRAFT[:4], DRAFT[:3]]
    assert made.drafts(0, 0, MANY) == []
    assert made.decision is None
    # What a sample writes takes of its room.
    made = Drafter(1, room=4)
    made.append(["0", "gone"], [[7, 8], [9]])
    assert made.drafts(1, 100, MANY) == [DRAFT[:2]]


def test_drafts_that_cost_nothing_are_verified_whole_and_dear_ones_not_at_all() -> None:
    assert drafter(3, 0.0).drafts(3, 300, MANY) == [DRAFT] * 3
    dear = drafter(3, 100.0)
    assert dear.drafts(3, 300, MANY) == [[]] * 3
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
    made = Drafter(1, plan)
    learnt: list[Fates] = []
    plan.learn = learnt.append  # type: ignore[method-assign]
    for most, sampled in ((2, [11, 12, 13]), (2, [11, 9]), (0, [9]), (0, [11]), (4, [*DRAFT, 9]), (0, [])):
        made.drafts(1, 100, most)
        made.append(["0"], [sampled])
    made.drafts(1, 100, MANY)
    assert [(fates.judged, fates.right) for fates in learnt] == [
        ([3], [3]), ([2], [1]), ([1], [0]), ([1], [1]), ([4], [4]),
    ]  # fmt: skip
    # Left out: nothing was proposed.
    made.leave_out()
    made.append(["0"], [[11]])
    made.drafts(1, 100, MANY)
    assert len(learnt) == 5


def test_arrays_hold_the_same_as_lists() -> None:
    made = Drafter(2, room=4)
    made.append_flat(["0", "1"], np.array([2, 1]), np.array([7, 8, 9], np.int32))
    made.proposed(["0", "1"], [DRAFT, DRAFT])
    assert made.draft_flat(["0", "1"]).tokens() == [DRAFT[:2], DRAFT[:3]]


def test_all_drafts_are_from_the_one_source() -> None:
    came = Drafter(2).verified(Verified.of(["0", "1"], [4, 2], [3, 0]))
    assert (came.sources.tolist(), came.numbers.tolist(), came.accepted) == ([0, 0], [-1, -1], [3])
    assert Drafter(0).names == ("ngram",)


def test_drafts_must_be_worth_more_than_a_little() -> None:
    """Four samples, of whose drafts all is accepted, in steps that verifying makes longer by nearly as much."""
    for gain, verified in ((LEAST_GAIN - 0.01, False), (LEAST_GAIN + 0.01, True)):
        plan = planner(0.0, ms_to_verify=10.0 * ((1 + TOKENS) / gain - 1))
        for _ in range(400):
            plan.learn(Fates([1000] * 40, [TOKENS] * 40, [TOKENS] * 40))
            plan.computing()
        drafts, decision = plan.cut([1000] * 4, [TOKENS] * 4, 4, 100, MANY)
        assert any(drafts) == verified
        # What the step is expected to take is not what the choice was made by.
        assert decision.seconds == plan.predictor.step_seconds(4, 100, decision.drafts)


def test_new_weights_make_it_doubt() -> None:
    plan = planner(1.0)
    Samples(Drafter(1, plan), [TOKENS]).steps(200)
    sure = plan.cut([1000], [TOKENS], 1, 100, MANY)[1].expected_accepted
    for _ in range(6):
        plan.policy_updated()
    assert plan.cut([1000], [TOKENS], 1, 100, MANY)[1].expected_accepted < sure


def test_bad_questions() -> None:
    made = Drafter(1)
    with pytest.raises(ValueError, match="has started already"):
        made.begin(0)
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
    made = Drafter(0, None if ms_a_row is None else planner(ms_a_row))
    for number, (_, room) in enumerate(samples):
        made.begin(number, room)
    drafts = made.drafts(len(samples), 50 * len(samples), most, [size for size, _ in samples])
    assert len(drafts) == len(samples) and sum(map(len, drafts)) <= most
    for draft, (size, room) in zip(drafts, samples, strict=True):
        assert draft == DRAFT[: len(draft)] and len(draft) <= min(size, max(room, 0))
