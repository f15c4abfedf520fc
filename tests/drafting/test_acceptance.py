"""The acceptance model learns the rates that it observed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.acceptance import FIRST_RECENT, POSITION_PRIOR, PRIOR, AcceptanceModel, PositionAcceptance
from rhyme_openrlhf.drafting.planner import Drafts
from rhyme_openrlhf.drafting_core import core
from tests.examples import examples

SEEN = 4000
# Of a draft of bare tokens.
TOKENS = 4


def test_before_anything_is_seen_the_prior_answers() -> None:
    assert AcceptanceModel(2).table[1, 0, 0] == pytest.approx(PRIOR)


def cell(source: int, match: int, recent: int, confidence: int) -> int:
    return int(np.ravel_multi_index((source, match, recent, confidence), AcceptanceModel(source + 1).table.shape))


def observe(model: AcceptanceModel, cells: list[int], accepted: int) -> None:
    """One draft of tokens of these cells, all verified."""
    number, verified, hits = (np.array([value]) for value in (0, len(cells), accepted))
    model.learn(np.array(cells, dtype=np.int32), np.array([len(cells)]), number, verified, hits)


def test_it_finds_the_rate_of_each_source_and_class() -> None:
    model = AcceptanceModel(2)
    rng = np.random.default_rng(0)
    truth = {(0, 5): 0.9, (0, 2): 0.4, (1, 5): 0.6}
    for (source, confidence), rate in truth.items():
        for hit in rng.random(SEEN) < rate:
            observe(model, [cell(source, 3, 2, confidence)], int(hit))
    model.refit()
    for (source, confidence), rate in truth.items():
        assert model.table[source, 3, 2, confidence] == pytest.approx(rate, abs=0.03)


def test_tokens_behind_a_rejected_one_teach_nothing() -> None:
    seen, unseen = AcceptanceModel(1), AcceptanceModel(1)
    observe(seen, [cell(0, 1, 1, c) for c in (3, 4, 5)], 1)
    observe(unseen, [cell(0, 1, 1, c) for c in (3, 4)], 1)
    seen.refit()
    unseen.refit()
    assert np.array_equal(seen.table, unseen.table)
    assert not np.array_equal(seen.table, AcceptanceModel(1).table)


def test_more_confidence_is_never_less_probability() -> None:
    model = AcceptanceModel(1)
    for confidence, accepted in ((0, 1), (3, 0), (5, 0)):
        for _ in range(200):
            observe(model, [cell(0, 0, 0, confidence)], accepted)
    model.refit()
    assert (np.diff(model.table, axis=-1) >= 0).all()


def accepted_then_rejected(updates: int) -> AcceptanceModel:
    model = AcceptanceModel(1)
    for _ in range(200):
        observe(model, [cell(0, 0, 0, 5)], 1)
    for _ in range(updates):
        model.forget()
    for _ in range(50):
        observe(model, [cell(0, 0, 0, 5)], 0)
    model.refit()
    return model


def test_after_updates_new_figures_weigh_more() -> None:
    before, after = (accepted_then_rejected(updates).table[0, 0, 0, 5] for updates in (0, 3))
    assert after < before - 0.2


def test_each_token_has_the_class_of_its_confidence_and_of_what_matches_before_it() -> None:
    model = AcceptanceModel(2)
    model.table[:] = np.arange(model.table.size).reshape(model.table.shape)
    # Two drafts: the second token of the first has one more token before it.
    drafts = Drafts(
        lengths=np.array([2, 1]), flat=np.zeros(3, np.int32), confidences=np.float32([1.0, 0.4, 0.0]),
        sources=np.array([1, 0]), matches=np.array([7, 30]), recents=np.array([999, 0]),
    )  # fmt: skip
    cells, acceptance = model.estimate(drafts)
    wanted = [cell(1, 1, 4, 6), cell(1, 2, 4, 1), cell(0, 5, 0, 0)]
    assert cells.tolist() == wanted
    assert acceptance.tolist() == wanted


def test_drafts_that_were_not_seen_teach_nothing_nor_does_what_lies_past_their_end() -> None:
    model = AcceptanceModel(1)
    cells, lengths = np.array([cell(0, 1, 1, 3), cell(0, 1, 1, 4)], dtype=np.int32), np.array([1, 1])
    numbers, verified, accepted = np.array([-1, 0, 2]), np.array([1, 9, 1]), np.array([1, 9, 1])
    assert model.learn(cells, lengths, numbers, verified, accepted) == 1
    other = AcceptanceModel(1)
    observe(other, [cell(0, 1, 1, 3)], 1)
    model.refit()
    other.refit()
    assert np.array_equal(model.table, other.table)


def test_drafts_whose_arrays_do_not_fit_are_refused() -> None:
    model = AcceptanceModel(1)
    one, none = np.array([1]), np.zeros(0, np.int64)
    for sources, matches in ((one, one), (none, one)):
        drafts = Drafts(one, np.zeros(1, np.int32), np.ones(1, np.float32), sources, matches, one)
        with pytest.raises(ValueError, match="do not fit"):
            model.estimate(drafts)


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    out = np.empty((1, values.size), np.float32)
    core.make_isotonic(values[None], weights[None], out)
    return out[0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_isotonic_ascends_and_keeps_the_weighted_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= -1e-12).all()
    assert np.average(fitted, weights=weights) == pytest.approx(np.average(values, weights=weights), rel=1e-5)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def asked(model: PositionAcceptance, recent: int = FIRST_RECENT) -> list[float]:
    return [float(p) for p in model.likelihoods(ints(recent))[0]]


def teach(model: PositionAcceptance, times: int, accepted: int, recent: int = FIRST_RECENT) -> None:
    every = np.ones(times, dtype=np.int64)
    model.learn(recent * every, TOKENS * every, accepted * every)
    model.refit()


def test_before_anything_was_seen_every_place_has_the_prior() -> None:
    assert asked(PositionAcceptance(TOKENS)) == pytest.approx([POSITION_PRIOR] * TOKENS)


def test_a_place_learns_from_drafts_that_reached_it() -> None:
    model = PositionAcceptance(TOKENS)
    teach(model, 2000, accepted=2)
    first, second, third, fourth = asked(model)
    assert first > 0.98 and second > 0.98 and third < 0.02
    # Nothing has reached the fourth: it is as the third.
    assert fourth == pytest.approx(third, abs=0.02)


def test_samples_that_fare_differently_are_told_apart() -> None:
    model = PositionAcceptance(TOKENS)
    teach(model, 1000, accepted=4, recent=1000)
    teach(model, 1000, accepted=0, recent=0)
    assert asked(model, 1000)[0] > 0.95 and asked(model, 0)[0] < 0.05


def test_forgetting_halves_what_was_seen_of_places() -> None:
    model, other = PositionAcceptance(TOKENS), PositionAcceptance(TOKENS)
    teach(model, 64, accepted=4)
    teach(other, 32, accepted=4)
    model.forget()
    model.refit()
    assert asked(model) == pytest.approx(asked(other))


def test_drafts_have_a_row_each() -> None:
    model = PositionAcceptance(TOKENS)
    teach(model, 500, accepted=1)
    found = model.likelihoods(ints(FIRST_RECENT, 0, FIRST_RECENT))
    assert found.tolist() == [asked(model), asked(model, 0), asked(model)]
    assert model.likelihoods(ints()).shape == (0, TOKENS)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, TOKENS), st.integers(0, TOKENS)), max_size=60))
def test_probabilities_stay_probabilities(fates: list[tuple[int, int, int]]) -> None:
    model = PositionAcceptance(TOKENS)
    recents, verified, accepted = np.array(fates, dtype=np.int64).reshape(-1, 3).T
    model.learn(recents, verified, np.minimum(accepted, verified))
    model.refit()
    assert np.all(model.table > 0) and np.all(model.table < 1)
