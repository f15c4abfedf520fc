"""Acceptance by place in the draft: what is learnt of drafters that say nothing of their confidence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.acceptance import FIRST_RECENT
from rhyme_openrlhf.drafting.position_acceptance import PRIOR, PositionAcceptance
from tests.examples import examples

TOKENS = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def asked(model: PositionAcceptance, recent: int = FIRST_RECENT) -> list[float]:
    return [float(p) for p in model.likelihoods(ints(recent))[0]]


def teach(model: PositionAcceptance, times: int, accepted: int, recent: int = FIRST_RECENT) -> None:
    every = np.ones(times, dtype=np.int64)
    model.learn(recent * every, TOKENS * every, accepted * every)
    model.refit()


def test_before_anything_was_seen_every_place_has_the_prior() -> None:
    assert asked(PositionAcceptance(TOKENS)) == pytest.approx([PRIOR] * TOKENS)


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


def test_forgetting_halves_what_was_seen() -> None:
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
