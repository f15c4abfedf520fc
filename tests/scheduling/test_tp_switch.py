"""The TP switch: against its plain form, and what orders are never given; against the best points: tests/oracles."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.scheduling import tp_switch
from rhyme_openrlhf.scheduling.stage_course import Layout, Unfinished, UnfinishedSamples, by_history, by_maximum
from rhyme_openrlhf.scheduling.tp_switch import SwitchCost, decide, in_turn
from rhyme_openrlhf.simulation.engine_kinds import load
from tests.examples import examples
from tests.latency import formula
from tests.scheduling.plain_tp_switch import Rule, lengths_by_history, stage_so_far

MOST = 16384


def wide(running: int, context: int, drafts: int) -> float:
    """One engine over all devices: quick for few, dear for many."""
    return 0.0096 + 1.7e-4 * running + 2e-8 * context


def narrow(running: int, context: int, drafts: int) -> float:
    """One of four engines of a quarter each."""
    return 0.0154 + 2.9e-4 * running + 9e-8 * context


LAYOUTS = (Layout(2, 4, narrow), Layout(8, 1, wide))


def cost(_from: int, _to: int, contexts: Sequence[int]) -> float:
    return 0.5 + 2e-5 * sum(contexts)


@pytest.mark.parametrize("from_history", [True, False])
def test_samples_of_unknown_engines_are_spread_evenly(from_history: bool) -> None:
    draw = random.Random(5)
    for _ in range(20):
        samples = [Unfinished(n, n, (n + draw.randrange(3000),)) for n in (draw.randrange(900) for _ in range(13))]
        spread = [place % 4 for place in range(len(samples))]
        unknown = decide(0, LAYOUTS, samples, MOST, cost, from_history)
        assert unknown == decide(0, LAYOUTS, samples, MOST, cost, from_history, spread)
        assert unknown != decide(0, LAYOUTS, samples, MOST, cost, from_history, [0] * len(samples))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 9000)), min_size=1, max_size=40), st.floats(0, 3))
def test_step_times_asked_all_at_once_change_nothing(pairs: list[tuple[int, int]], drafts: float) -> None:
    samples = [Unfinished(done, done + 50, (length, 2 * length)) for done, length in pairs]
    found = []
    for together in (False, True):
        layouts = []
        for size, engines, slower in ((2, 4, 1.0), (8, 1, 0.55)):
            points = tuple(dataclasses.replace(p, seconds=slower * p.seconds) for p in formula.profile().steps)
            times = Predictor(StepModel(formula.profile(steps=points)))
            many = times.seconds_of if together else None
            layouts.append(Layout(size, engines, times.step_seconds, 1 + drafts / 2, drafts, many))
        found.append(decide(0, layouts, samples, MOST, lambda *_: 0.01))
    assert found[0] == found[1]


def test_equal_lengths_are_not_switched() -> None:
    """Nothing drains: all samples of a full node end together."""
    samples = [Unfinished(500, 600, (1000, 1001, 1002))] * 128
    assert decide(0, LAYOUTS, samples, MOST, cost) is None
    assert decide(0, LAYOUTS, samples, MOST, cost, from_history=False) is None


def test_the_last_sample_is_switched_if_it_has_far_to_go() -> None:
    far, near = Unfinished(4000, 4100, (12000,)), Unfinished(4000, 4100, (4010,))
    order = decide(0, LAYOUTS, [far], MOST, cost)
    assert order is not None and order.target == 1 and order.seconds_switched < order.seconds_stay
    assert decide(0, LAYOUTS, [near], MOST, cost) is None
    # The paper's bound cannot tell them apart.
    assert decide(0, LAYOUTS, [near], MOST, cost, from_history=False) is not None
    assert decide(1, LAYOUTS, [far], MOST, cost) is None
    assert decide(0, LAYOUTS, [], MOST, cost) is None


@settings(deadline=None)
@given(st.lists(st.integers(1, 6000), max_size=6), st.integers(0, 5999))
def test_scenarios_keep_to_what_is_possible(earlier: list[int], done: int) -> None:
    sample = Unfinished(done, done, tuple(earlier))
    found = by_history(UnfinishedSamples.of([sample, sample]), 6000)
    assert found.shape == (8, 2) and found.min() >= 1 and (done + found).max() <= 6000
    longer = [length for length in earlier if length > done]
    if longer:
        assert set((found + done).ravel()) <= set(longer)
    assert by_maximum(UnfinishedSamples.of([sample]), 6000).tolist() == [[6000 - done]]


RUNNING = st.tuples(
    st.integers(0, 3000), st.lists(st.integers(1, 9000), max_size=5), st.integers(0, 3), st.integers(0, 300)
)


@settings(deadline=None)
@given(st.lists(RUNNING, min_size=1, max_size=40), st.integers(1, 6000))
def test_scenarios_are_those_of_the_plain_form(drawn: list[tuple[int, list[int], int, int]], longest: int) -> None:
    samples = [Unfinished(done, done, tuple(earlier)) for done, earlier, _, _ in drawn]
    assert by_history(UnfinishedSamples.of(samples), longest).tolist() == lengths_by_history(samples, longest)


def test_a_switch_costs_what_switches_have_cost() -> None:
    cost = SwitchCost(0.02)
    assert cost.seconds(None, None, [100] * 4) == pytest.approx(0.08)
    cost.learn(2.0, None, None, [100] * 10)
    # Half of what the last one cost a sample, and half of what was known before.
    assert cost.seconds(None, None, [1]) == pytest.approx((0.2 + 0.02) / 2)


def test_a_switch_costs_by_context_before_one_was_made() -> None:
    """PAT's case: nine samples of 12K tokens, from TP 2 to TP 8 on A40, took 2.36 s beside resharding."""
    small, large = (TransferModel(profile) for profile in load(["pat-a40"]).values())
    cost = SwitchCost()
    assert cost.between([small, large])(0, 1, [12_000] * 9) == pytest.approx(2.36, rel=0.1)
    assert cost.seconds(small, large, [1_000] * 9) < 0.4
    assert SwitchCost(fixed_s=3.16).seconds(small, large, [12_000] * 9) == pytest.approx(5.52, rel=0.05)
    predicted = cost.seconds(small, large, [6_000] * 4)
    cost.learn(3 * predicted, small, large, [6_000] * 4)
    assert cost.seconds(small, large, [6_000] * 4) == pytest.approx(2 * predicted)


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_samples_are_dealt_out_longest_first(lengths: list[int], engines: int) -> None:
    dealt = in_turn(lengths, engines)
    assert sorted(place for place, _ in dealt) == list(range(len(lengths)))
    assert [engine for _, engine in dealt] == [turn % engines for turn in range(len(lengths))]
    assert [lengths[place] for place, _ in dealt] == sorted(lengths, reverse=True)


def test_a_full_engine_is_a_reason_to_switch() -> None:
    """Eight samples that end together: two on each engine they are soon done, all eight on one they are not."""
    samples = [Unfinished(1000, 1100, (1300,))] * 8
    layouts = (Layout(2, 4, dear), Layout(8, 1, wide))
    for from_history, allowed in ((True, MOST), (False, 1300)):
        even, one = [0, 1, 2, 3] * 2, [5] * 8
        assert decide(0, layouts, samples, allowed, lambda *_: 1.5, from_history, even) is None
        assert decide(0, layouts, samples, allowed, lambda *_: 1.5, from_history) is None
        order = decide(0, layouts, samples, allowed, lambda *_: 1.5, from_history, one)
        assert order is not None and order.seconds_stay == pytest.approx(300 * dear(8, 0, 0))


def dear(running: int, context: int, drafts: int) -> float:
    """An engine on which every sample costs."""
    return 0.005 + 3e-3 * running


def test_a_full_engine_that_is_soon_done_is_no_reason_to_switch() -> None:
    """Six samples on one engine end at once; what the stage waits for is alone on another and goes on as it would."""
    samples = [*[Unfinished(1000, 1100, (1010,))] * 6, Unfinished(1000, 1100, (1600,))]
    layouts = (Layout(2, 4, dear), Layout(8, 1, lambda running, *_: 0.0078 + 1e-4 * running))
    for from_history in (True, False):
        # Had the one share of the samples that the full engine has now, staying would take over twice as long.
        assert (
            decide(0, layouts, samples, 1600, lambda *_: 0.3, from_history, [0] * 6 + [1]) is None or not from_history
        )
    # While the six end, it is quicker alone; asked again then, it is worth it.
    assert decide(0, layouts, samples, 1600, lambda *_: 0.01, True, [0] * 6 + [1]) is None
    alone = [Unfinished(1029, 1129, (1600,))]
    assert decide(0, layouts, alone, 1600, lambda *_: 0.01, True, [1]) is not None


def pair(running: int, context: int, drafts: int) -> float:
    """One of two engines: quicker than `LAYOUTS`' narrow one below some twenty samples on the node."""
    return 0.0110 + 5e-4 * running + 4e-8 * context


def all_on_one(running: int, context: int, drafts: int) -> float:
    """Quickest for the last three."""
    return 0.0080 + 1.2e-3 * running + 2e-8 * context


THREE = (Layout(2, 4, narrow), Layout(4, 2, pair), Layout(8, 1, all_on_one))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 4000)), min_size=1, max_size=40),
    st.integers(0, 2),
    st.booleans(),
    st.floats(0, 3),
)
def test_a_node_goes_to_larger_engines_only_and_only_if_that_pays(
    pairs: list[tuple[int, int]], current: int, from_history: bool, dear: float
) -> None:
    samples = [Unfinished(done, done + 50, (done + more,)) for done, more in pairs]
    order = decide(current, THREE, samples, MOST, lambda *_: dear, from_history)
    if order is not None:
        assert order.target > current and order.seconds_switched < order.seconds_stay
    # A layout more that is never quicker changes nothing.
    slower = Layout(16, 1, lambda running, context, _: 1.0 + running)
    assert decide(current, (*THREE, slower), samples, MOST, lambda *_: dear, from_history) == order


@settings(max_examples=examples(80), deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.integers(2, 60),
    st.integers(0, 2500),
    st.integers(0, 1),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from([1, 2, 16]),
)
# To wait pays, but not for the next sample's end: drawn, that is one in a hundred.
@example(374, 19, 1127, 0, 0.0, 5.0, 1, False, 2)
@example(813, 50, 1135, 0, 0.0, 10.0, 3, False, 16)
def test_what_is_left_out_changes_no_order(
    seed: int, count: int, done: int, current: int, drafts: float, dear: float, cheap: int, three: bool, at_once: int
) -> None:
    """Against the plain form, which looks at every moment by itself. With so few left that a switch is cheap, a later
    moment may be better than now, and the next one not."""
    samples, engines = stage_so_far(seed, count, done)
    assume(samples)
    layouts = [
        dataclasses.replace(layout, tokens_per_step=1 + drafts / 2, drafts_per_step=drafts)
        for layout in (THREE if three else THREE[::2])
    ]
    current = min(current, len(layouts) - 2)

    def seconds(_from: int, _to: int, contexts: Sequence[int]) -> float:
        return dear * (1 + sum(contexts) * 1e-5) * (len(contexts) > cheap)

    rule = Rule(layouts, seconds)
    plain = rule.decide(current, samples, MOST, engines)
    # Where two ways take all but the same, either may be taken.
    assume(rule.closest > 1e-9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp_switch, "_AT_ONCE", at_once)
        found = decide(current, layouts, samples, MOST, seconds, True, engines)
    assert (found is None) == (plain is None)
    if found is not None and plain is not None:
        assert found.target == plain.target
        assert found.seconds_stay == pytest.approx(plain.seconds_stay, rel=1e-9)
        assert found.seconds_switched == pytest.approx(plain.seconds_switched, rel=1e-9)
