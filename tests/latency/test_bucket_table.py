"""Step seconds of many steps at once are those of one step each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.latency import bucket_table
from rhyme_openrlhf.latency.bucket_table import BucketTable
from rhyme_openrlhf.latency.predictor import Predictor, context_bucket
from rhyme_openrlhf.latency.step_model import StepModel
from tests.latency import formula

columns = st.lists(st.tuples(st.integers(1, 80), st.integers(0, 200)), min_size=1, max_size=6)


@given(columns, st.integers(1, 4), st.booleans(), st.integers(0, 2**30))
def test_many_steps_are_answered_as_one_by_one(
    steps: list[tuple[int, int]], rows: int, corrected: bool, seed: int
) -> None:
    predictor = Predictor(StepModel(formula.profile()))
    if corrected:
        predictor.observe(3, 100, 0, 0.05)
    # Short contexts and some beyond what the table begins with.
    contexts = np.random.default_rng(seed).choice([0, 1, 15, 31, 32, 33, 1000, 65_535, 2**27], (rows, len(steps)))
    running, drafts = [step[0] for step in steps], [step[1] for step in steps]
    asked = [
        [predictor.step_seconds(*step) for step in zip(running, row, drafts, strict=True)] for row in contexts.tolist()
    ]
    for _ in range(2):
        assert predictor.seconds_of(running, contexts, drafts).tolist() == asked


def test_each_bucket_is_asked_once_and_the_table_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_table, "MOST_ROWS", 3)
    asked: list[tuple[int, int]] = []

    def seconds(running: int, context: int, drafts: int) -> float:
        asked.append((running, context_bucket(context)))
        return float(running)

    table = BucketTable(seconds)
    for _ in range(2):
        found = table.of([1, 2], np.array([[100, 100], [101, 4000]]), [0, 0])
        assert found.tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert sorted(asked) == [(1, context_bucket(100)), (2, context_bucket(100)), (2, context_bucket(4000))]
    kinds = len(asked)
    # Two more kinds of step do not fit: what was known is forgotten, and asked again.
    table.of([3, 4], np.array([[5, 5]]), [0, 0])
    table.of([1, 2], np.array([[100, 100]]), [0, 0])
    assert len(asked) == kinds + 4
