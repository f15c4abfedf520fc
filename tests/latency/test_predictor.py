"""Cache, correction, and what lies outside of the profile."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.latency import predictor as module
from rhyme_openrlhf.latency.predictor import (
    BOUND,
    FIRST,
    MOST_AT_ONCE,
    RATE,
    Correction,
    Predictor,
    SpeculationOverhead,
    context_bucket,
)
from rhyme_openrlhf.latency.step_model import StepModel
from tests.latency import formula


def predictor(told: list[str] | None = None) -> Predictor:
    return Predictor(StepModel(formula.profile()), (told if told is not None else []).append)


@given(st.integers(0, 10_000_000))
def test_a_bucket_is_near_what_it_stands_for(context: int) -> None:
    assert abs(context_bucket(context) - context) <= context / 16
    assert context_bucket(context_bucket(context)) == context_bucket(context)


@given(st.integers(1, 64), st.integers(64, 2000), st.integers(0, 15))
def test_the_cache_changes_little(running: int, each: int, drafts_each: int) -> None:
    asked, context, drafts = predictor(), running * each, running * drafts_each
    exact = asked.model.seconds(running, context, drafts)
    for _ in range(2):
        assert asked.profiled_seconds(running, context, drafts) == pytest.approx(exact, rel=0.07)


def test_answers_and_tables_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWERS", 5)
    monkeypatch.setattr(module, "MOST_TABLES", 3)
    asked = predictor()
    for running in range(1, 30):
        assert asked.profiled_seconds(running, 100, 0) == asked.model.seconds(running, context_bucket(100), 0)
        asked.step_table(running, 100, 8)
        assert len(asked._cache) <= 5 and len(asked._tables) <= 3


def test_what_lies_outside_is_said_once() -> None:
    told: list[str] = []
    asked = predictor(told)
    asked.step_seconds(4, 400, 0)
    assert told == []
    asked.step_seconds(500, 500, 0)
    asked.step_seconds(600, 600, 0)
    assert len(told) == 1 and told[0].startswith("step times of 500 samples")


def test_steps_that_take_longer_are_learnt() -> None:
    asked = predictor()
    for _ in range(400):
        asked.observe(16, 4096, 48, 1.5 * asked.profiled_seconds(16, 4096, 48))
    assert asked.step_seconds(16, 4096, 48) == pytest.approx(1.5 * asked.profiled_seconds(16, 4096, 48), rel=0.01)
    # Sizes that were not seen follow the average of all.
    assert asked.step_seconds(1, 64, 0) == pytest.approx(1.5 * asked.profiled_seconds(1, 64, 0), rel=0.01)


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), max_size=60))
def test_no_observation_moves_it_far(pairs: list[tuple[float, float]]) -> None:
    # The first one weighs most.
    far = MOST_AT_ONCE - 1
    most = math.log((1 + RATE * far) * (1 + far / FIRST))
    learnt, before = Correction(), 0.0
    for predicted, measured in pairs:
        learnt.observe(4, 0, predicted, measured)
        now = math.log(learnt.factor(4, 0))
        assert abs(now - before) <= most + 1e-9
        assert abs(now) <= math.log(BOUND) + 1e-9
        before = now


def test_a_size_that_was_long_not_seen_follows_the_others() -> None:
    learnt = Correction()
    for _ in range(200):
        learnt.observe(64, 0, 1.0, 1.2)
        learnt.observe(2, 0, 1.0, 1.0)
    assert learnt.factor(64, 0) / learnt.factor(2, 0) == pytest.approx(1.2, rel=0.02)
    # The machine becomes twice as slow, and only few samples run.
    for _ in range(60):
        learnt.observe(2, 0, 1.0, 2.0)
    assert learnt.factor(64, 0) == pytest.approx(2.4, rel=0.2)


def test_a_long_tail_moves_the_mean_as_it_should() -> None:
    chance, learnt, found = random.Random(1), Correction(), []
    for step in range(4000):
        learnt.observe(8, 0, 1.0, 1.9 if chance.random() < 0.2 else 1.0)
        if step > 500:
            found.append(learnt.factor(8, 0))
    assert statistics.fmean(found) == pytest.approx(1.18, rel=0.03)


def test_draft_counts_of_one_stair_are_corrected_alike() -> None:
    """Else chance says that a draft should end before the stair does."""
    asked = Predictor(StepModel(formula.profile(padded_rows=(16, 32, 64))))
    for drafts, slower in ((1, 0.9), (9, 1.1)):
        for _ in range(30):
            asked.observe(1, 64, drafts, slower * asked.profiled_seconds(1, 64, drafts))
    table = asked.step_table(1, 64, 40)
    # 2 to 16 rows are one stair, so are 17 to 32; without drafts it is another kind of step.
    assert len(set(table[1:16])) == 1 and len(set(table[16:32])) == 1
    assert asked.correction.factor(1, 0) != asked.correction.factor(1, 1)


def test_a_table_holds_what_the_single_questions_answer() -> None:
    asked = predictor()
    for drafts, slower in ((0, 1.2), (48, 2.0)):
        for _ in range(100):
            asked.observe(16, 4096, drafts, slower * asked.profiled_seconds(16, 4096, drafts))
    for _ in range(2):
        table = asked.step_table(16, 4096, 100)
        assert table == pytest.approx([asked.step_seconds(16, 4096, drafts) for drafts in range(101)])


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(40, 2000), st.integers(0, 300))
def test_a_table_is_what_single_questions_are_answered(running: int, each: int, most: int) -> None:
    asked, context = predictor(), running * each
    asked.observe(running, context, 3, 1.3 * asked.profiled_seconds(running, context, 3))
    wanted = [asked.step_seconds(running, context, drafts) for drafts in range(most + 1)]
    assert asked.step_table(running, context, most).tolist() == pytest.approx(wanted)


def test_the_overhead_of_speculation_is_that_of_steps_without_drafts() -> None:
    """What drafts add is not in it, nor what disturbs the machine now."""
    overhead = SpeculationOverhead(formula.profile(unspeculated=formula.unspeculated(0.8)))
    for running, context in ((1, 32), (7, 3000), (64, 64 * 2048)):
        assert overhead.factor(running, context) == pytest.approx(1 / 0.8)
    with pytest.raises(ValueError, match="needs decode steps"):
        SpeculationOverhead(formula.profile())
