"""What the model learns is what it was shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.speculation.acceptance import (
    CONFIDENCES,
    PRIOR,
    AcceptanceModel,
    confidence_class,
    isotonic,
    match_class,
    recent_class,
)

SEEN = 4000


def test_before_anything_is_seen_the_prior_answers() -> None:
    assert AcceptanceModel(2).table[1, 0, 0] == pytest.approx(PRIOR)


def test_it_finds_the_rate_of_each_source_and_class() -> None:
    model = AcceptanceModel(2)
    rng = np.random.default_rng(0)
    truth = {(0, 5): 0.9, (0, 2): 0.4, (1, 5): 0.6}
    for (source, confidence), rate in truth.items():
        for hit in rng.random(SEEN) < rate:
            model.observe(source, 3, 2, [confidence], int(hit))
    model.refit()
    for (source, confidence), rate in truth.items():
        assert model.table[source, 3, 2, confidence] == pytest.approx(rate, abs=0.03)


def test_tokens_behind_a_rejected_one_teach_nothing() -> None:
    seen, unseen = AcceptanceModel(1), AcceptanceModel(1)
    seen.observe(0, 1, 1, [3, 4, 5], 1)
    unseen.observe(0, 1, 1, [3, 4], 1)
    seen.refit()
    unseen.refit()
    assert np.array_equal(seen.table, unseen.table)


def test_more_confidence_is_never_less_probability() -> None:
    model = AcceptanceModel(1)
    for confidence, accepted in ((0, 1), (3, 0), (5, 0)):
        for _ in range(200):
            model.observe(0, 0, 0, [confidence], accepted)
    model.refit()
    assert (np.diff(model.table, axis=-1) >= 0).all()


def accepted_then_rejected(updates: int) -> AcceptanceModel:
    model = AcceptanceModel(1)
    for _ in range(200):
        model.observe(0, 0, 0, [5], 1)
    for _ in range(updates):
        model.forget()
    for _ in range(50):
        model.observe(0, 0, 0, [5], 0)
    model.refit()
    return model


def test_after_updates_new_figures_weigh_more() -> None:
    before, after = (accepted_then_rejected(updates).table[0, 0, 0, 5] for updates in (0, 3))
    assert after < before - 0.2


def test_more_accepted_than_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="2 of 1 draft tokens"):
        AcceptanceModel(1).observe(0, 0, 0, [1], 2)


def test_classes_cover_every_value() -> None:
    assert confidence_class(0.0) == 0 and confidence_class(1.0) == CONFIDENCES - 1
    assert match_class(3) == 0 and match_class(1000) == 5
    assert recent_class(0.0) == 0 and recent_class(1.0) == 4


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_isotonic_ascends_and_keeps_the_weighted_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= -1e-12).all()
    assert np.average(fitted, weights=weights) == pytest.approx(np.average(values, weights=weights))
