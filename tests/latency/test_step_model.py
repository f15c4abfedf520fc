"""The fitted step model against the formula its points were made with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency.profile import Profile, StepPoint
from rhyme_openrlhf.latency.step_model import StepModel
from tests.latency import formula

model = StepModel(formula.profile())


def test_every_profiled_point_is_answered_as_measured() -> None:
    for point in formula.profile().steps:
        assert model.seconds(point.running, point.context, point.drafts) == pytest.approx(point.seconds)


@given(st.integers(1, 64), st.integers(32, 2048))
def test_plain_steps_between_the_points(running: int, each: int) -> None:
    wanted = formula.formula(running, running * each, 0)
    assert model.seconds(running, running * each, 0) == pytest.approx(wanted, rel=1e-6)


@given(st.integers(1, 64), st.integers(40, 2000), st.integers(1, 15))
def test_verifying_steps_between_the_points(running: int, each: int, drafts_each: int) -> None:
    drafts = running * drafts_each
    wanted = formula.formula(running, running * each, drafts)
    # Fewer rows than any profiled step of the neighbours has are answered by the nearest that was.
    assert model.seconds(running, running * each, drafts) == pytest.approx(wanted, rel=0.12)


@given(st.integers(1, 400), st.integers(1, 100_000), st.integers(0, 1000))
def test_more_context_never_costs_less(running: int, context: int, drafts: int) -> None:
    assert model.seconds(running, context + 1000, drafts) >= model.seconds(running, context, drafts) > 0


@given(st.integers(1, 64), st.integers(32, 4000), st.integers(1, 500))
def test_drafts_on_one_stair_cost_the_same(running: int, context: int, drafts: int) -> None:
    last = model.rows(running, drafts) - running
    assert last >= drafts
    assert model.seconds(running, context, last) == model.seconds(running, context, drafts)


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 100_000), st.integers(0, 700))
def test_a_table_has_the_same_answers(running: int, context: int, most: int) -> None:
    wanted = [model.seconds(running, context, drafts) for drafts in range(most + 1)]
    assert model.table(running, context, most).tolist() == wanted


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 100_000), st.integers(0, 700))
def test_a_table_without_profiled_verification_too(running: int, context: int, most: int) -> None:
    plain = tuple(point for point in formula.profile().steps if not point.drafts)
    without = StepModel(formula.profile(steps=plain))
    wanted = [without.seconds(running, context, drafts) for drafts in range(most + 1)]
    assert without.table(running, context, most).tolist() == wanted


def test_outside_goes_on_with_the_slope_and_says_so() -> None:
    assert not model.covers(128, 4096, 0)
    assert model.seconds(128, 4096, 0) == pytest.approx(formula.formula(128, 4096, 0))
    assert not model.covers(4, 4 * 4096, 0)
    assert model.covers(4, 400, 0) and model.covers(4, 400, 12)


def test_drafts_beyond_a_single_measured_count_cost_something() -> None:
    """With 256 samples an H200 had room for one draft each, so its profile has no other number."""
    points = tuple(point for point in formula.profile().steps if point.running < 64 or point.drafts <= 64)
    model = StepModel(formula.profile(steps=points, padded_rows=()))
    one, seven = (model.seconds(64, 4096, 64 * each) for each in (1, 7))
    assert one == pytest.approx(formula.formula(64, 4096, 64))
    slope = (one - model.seconds(64, 4096, 0)) / 64
    assert seven == pytest.approx(one + 6 * 64 * slope) and slope > 0


def test_noise_between_draft_counts_of_one_stair_is_not_a_slope() -> None:
    # As real profiles have them: 4 and 12 drafts of four samples are both 16 rows, at contexts two tokens apart.
    points = (
        StepPoint(4, 132, 0, 0.0140, 0.0, 9),
        StepPoint(4, 135, 4, 0.0189, 0.0, 9), StepPoint(4, 135, 12, 0.0130, 0.0, 9),
        StepPoint(4, 1031, 4, 0.0141, 0.0, 9), StepPoint(4, 1033, 12, 0.0157, 0.0, 9),
    )  # fmt: skip
    noisy = StepModel(formula.profile(steps=points))
    assert noisy.seconds(4, 135, 12) == pytest.approx(0.01595)
    assert noisy.seconds(4, 1032, 4) == noisy.seconds(4, 1300, 12) == pytest.approx(0.0149)


def test_without_profiled_verification_rows_cost_what_samples_cost() -> None:
    plain = tuple(point for point in formula.profile().steps if not point.drafts)
    without = StepModel(formula.profile(steps=plain, padded_rows=()))
    assert without.seconds(4, 1000, 12) == pytest.approx(without.seconds(16, 1000, 0))


@pytest.mark.parametrize("shape", [(0, 10, 0), (1, -1, 0), (1, 10, -1)])
def test_impossible_steps_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no step has"):
        model.seconds(*shape)


def test_no_step_takes_no_time_however_steep_a_disturbed_profile_is() -> None:
    """A stall at the second of two points makes the first one's neighbours below it free, and worse."""
    stalled = tuple(
        StepPoint(running, running * context, running * drafts, 0.5 if context > 32 or drafts > 1 else 0.005, 0.0, 6)
        for running in (4, 16)
        for context in (32, 256)
        for drafts in (0, 1, 3)
    )
    for steps in (stalled, tuple(point for point in stalled if not point.drafts)):
        model = StepModel(Profile(formula.SUBJECT, "measured", steps))
        for running, context in ((1, 1), (2, 10), (4, 4), (10, 20), (40, 5)):
            assert min(model.seconds(running, context, drafts) for drafts in range(6)) >= 0.0025
            assert model.table(running, context, 40).min() >= 0.0025


@pytest.mark.parametrize("padded", [(), (16, 32, 64), (1, 2, 4, 8)])
def test_the_fewest_tokens_that_are_padded_so_far(padded: tuple[int, ...]) -> None:
    model = StepModel(formula.profile(padded_rows=padded))
    for least in range(1, 100):
        assert model.first_rows(least) == next(rows for rows in range(1, 200) if model.rows(rows, 0) >= least)
