"""Step seconds of many steps at once are those of one step each, to the last bit."""

from __future__ import annotations

import dataclasses
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency import curve, step_kernels
from rhyme_openrlhf.latency.curve import Curve
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel, compile_seconds_of, compile_table
from tests.latency import formula


def noisy(profile: Profile, seed: int) -> Profile:
    """As real ones are: no two slopes alike, some downwards."""
    draw = random.Random(seed)
    steps = tuple(dataclasses.replace(point, seconds=point.seconds * draw.uniform(0.7, 1.4)) for point in profile.steps)
    return dataclasses.replace(profile, steps=steps)


WITH_DRAFTS = formula.profile()
PLAIN = formula.profile(steps=tuple(point for point in WITH_DRAFTS.steps if not point.drafts))
UNPADDED = dataclasses.replace(PLAIN, padded_rows=())
ONE_POINT = dataclasses.replace(PLAIN, steps=PLAIN.steps[:1])
PROFILES = {"drafts": WITH_DRAFTS, "plain": PLAIN, "unpadded": UNPADDED, "one point": ONE_POINT}

columns = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900)), min_size=1, max_size=6)


@pytest.mark.parametrize("name", PROFILES)
@settings(deadline=None)
@given(columns, st.integers(1, 4), st.booleans(), st.integers(0, 2**30))
def test_many_steps_are_answered_as_one_by_one(
    name: str, steps: list[tuple[int, int]], rows: int, corrected: bool, seed: int
) -> None:
    predictor = Predictor(StepModel(noisy(PROFILES[name], seed)))
    if corrected:
        predictor.observe(3, 100, 0, 0.05)
    contexts = np.random.default_rng(seed).choice([0, 1, 15, 31, 32, 33, 1000, 65_535, 2**27], (rows, len(steps)))
    asked = [
        [predictor.step_seconds(b, context, n) for (b, n), context in zip(steps, row, strict=True)]
        for row in contexts.tolist()
    ]
    running, drafts = np.array(steps).T
    assert predictor.seconds_of(running, contexts, drafts).tolist() == asked


@pytest.mark.parametrize("name", PROFILES)
@given(columns, st.integers(0, 400_000))
def test_what_lies_outside_is_found_where_the_model_says_so(
    name: str, steps: list[tuple[int, int]], context: int
) -> None:
    model = StepModel(PROFILES[name])
    running, drafts = np.array(steps).T
    # So many bits that every context stands for itself.
    _, found = model.seconds_of(running, np.full((1, len(steps)), context), drafts, 62, True)
    outside = [place for place, (b, n) in enumerate(steps) if not model.covers(b, context, n)]
    assert found == ((0, outside[0]) if outside else None)


def test_outside_is_told_once_for_many_steps_too() -> None:
    told: list[str] = []
    predictor = Predictor(StepModel(formula.profile()), told.append)
    predictor.seconds_of(np.array([4, 16]), np.array([[400, 1600]]), np.array([0, 0]))
    assert told == []
    for _ in range(2):
        predictor.seconds_of(np.array([4, 500]), np.array([[400, 500]]), np.array([0, 0]))
    assert len(told) == 1 and told[0].startswith("step times of 500 samples")


def test_after_compiling_no_profile_compiles_anything() -> None:
    compile_seconds_of()
    before = len(step_kernels.step_seconds.signatures)
    for profile in PROFILES.values():
        Predictor(StepModel(profile)).seconds_of(np.array([4, 16]), np.array([[400, 1600]]), np.array([0, 8]))
    assert before == len(step_kernels.step_seconds.signatures) > 0


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(1, 400), st.floats(0.001, 10.0), min_size=1, max_size=6),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.5]),
)
def test_values_along_a_curve_are_the_curves(points: dict[int, float], begin: int, count: int, least: float) -> None:
    asked = np.arange(begin, begin + count)
    xs = sorted(points)
    found = step_kernels.along(np.array(xs, dtype=float), np.array([points[x] for x in xs]), asked, least)
    assert found.tolist() == np.maximum(Curve(list(points.items())).at_all(asked), least).tolist()


def test_after_compiling_no_table_compiles_anything() -> None:
    compile_table()
    before = len(step_kernels.along.signatures)
    for profile in PROFILES.values():
        StepModel(profile).table(4, 400, 30)
    assert before == len(step_kernels.along.signatures) > 0


def test_a_change_of_the_curve_changes_what_numba_has_kept_of_its_caller() -> None:
    found = zlib.crc32(Path(curve.__file__).read_bytes())
    assert found == step_kernels.CALLED_SOURCES, f"write CALLED_SOURCES = {found} into {step_kernels.__file__}"
