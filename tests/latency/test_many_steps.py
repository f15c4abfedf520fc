"""Step seconds of many steps at once are those of one step each, to the last bit."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel, context_bucket
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
def test_what_lies_outside_is_told_where_the_model_says_so(
    name: str, steps: list[tuple[int, int]], context: int
) -> None:
    told: list[str] = []
    predictor = Predictor(StepModel(PROFILES[name]), told.append)
    running, drafts = np.array(steps).T
    predictor.seconds_of(running, np.full((1, len(steps)), context), drafts)
    middle = context_bucket(context)
    outside = [(b, n) for b, n in steps if not predictor.model.covers(b, middle, n)]
    assert [sentence.split(" lie ")[0] for sentence in told] == [
        f"step times of {b} samples with {middle} tokens of context and {n} draft tokens" for b, n in outside[:1]
    ]


def test_outside_is_told_once_for_many_steps_too() -> None:
    told: list[str] = []
    predictor = Predictor(StepModel(formula.profile()), told.append)
    predictor.seconds_of(np.array([4, 16]), np.array([[400, 1600]]), np.array([0, 0]))
    assert told == []
    for _ in range(2):
        predictor.seconds_of(np.array([4, 500]), np.array([[400, 500]]), np.array([0, 0]))
    assert len(told) == 1 and told[0].startswith("step times of 500 samples")
