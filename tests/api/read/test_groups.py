"""Groups of runs: what tells them apart, and the mean and spread over their seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.read.groups import Part, grouped, mean_curve, spread
from rhyme_openrlhf.api.store.curve_blocks import Points

# A record and a specification.
Known = tuple[dict[str, Any], dict[str, Any] | None]


def launched(config: dict[str, Any] | None = None, **groups: dict[str, Any]) -> Known:
    return config or {}, {"name": "a run", "arguments": groups}


def reported(**arguments: Any) -> Known:
    return {"arguments": arguments}, None


def test_the_seed_and_places_of_a_run_tell_no_groups_apart() -> None:
    runs = [
        launched(train={"seed": 1}, actor={"adam.lr": 1e-6}, ckpt={"path": "/a"}),
        launched(train={"seed": 2}, actor={"adam.lr": 1e-5}, run={"dir": "/b", "name": "b"}),
        launched(actor={"adam.lr": 1e-6}, logger={"tensorboard_dir": "/c"}, history={"spill_dir": "/c"}),
        launched(actor={"adam.lr": 1e-6}, control={"url": "http://d"}, train={"batch_size": 8}),
    ]
    assert grouped(runs) == [
        Part({"actor.adam.lr": 1e-6}, [0, 2], [1, None]),
        Part({"actor.adam.lr": 1e-5}, [1], [2]),
        # An option that the others leave at its default.
        Part({"actor.adam.lr": 1e-6, "train.batch_size": 8}, [3], [None]),
    ]


def test_specifications_are_compared_with_specifications_alone() -> None:
    recorded = {"arguments": {"actor": {"adam": {"lr": 1e-6}}, "train": {"seed": 1, "batch_size": 128}}}
    runs = [
        # A run that has started has a record too; one in the queue has none yet.
        launched(recorded, actor={"adam.lr": 1e-6}),
        launched(actor={"adam.lr": 1e-6}, train={"seed": 2}),
        reported(**recorded["arguments"]),
        reported(actor={"adam": {"lr": 1e-6}}, train={"seed": 7, "batch_size": 128}),
    ]
    assert grouped(runs) == [Part({}, [0, 1], [1, 2]), Part({}, [2, 3], [1, 7])]


def test_spread_is_that_of_a_sample() -> None:
    assert (spread([]).mean, spread([]).deviation) == (None, None)
    assert (spread([0.5]).runs, spread([0.5]).mean, spread([0.5]).deviation) == (1, 0.5, None)
    assert spread([1.0, 3.0]).deviation == pytest.approx(math.sqrt(2))


values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30)


@given(st.lists(st.tuples(st.integers(0, 5), values), min_size=1, max_size=5))
def test_the_mean_curve_is_over_the_runs_that_have_the_step(rows: list[tuple[int, list[float]]]) -> None:
    curves = [Points.of(range(first, first + len(of)), of) for first, of in rows]
    found = mean_curve(curves, 1000)
    by_step: dict[float, list[float]] = {}
    for curve in curves:
        for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
            by_step.setdefault(float(step), []).append(value)
    assert found.x == sorted(by_step)
    for at, mean, low, high, count in zip(found.x, found.mean, found.low, found.high, found.runs, strict=True):
        wanted = spread(by_step[at])
        assert count == wanted.runs
        assert mean == pytest.approx(wanted.mean, abs=1e-9)
        assert high - mean == pytest.approx(wanted.deviation or 0.0, abs=1e-6)
        assert mean - low == pytest.approx(wanted.deviation or 0.0, abs=1e-6)


def test_a_long_mean_curve_is_down_sampled_and_one_of_nothing_is_empty() -> None:
    steps = np.arange(1000)
    found = mean_curve([Points(steps, np.sin(steps)), Points(steps[:500], np.cos(steps[:500]))], 20)
    assert len(found.x) <= 20 and {found.runs[0], found.runs[-1]} == {1, 2}
    assert len(found.low) == len(found.high) == len(found.mean) == len(found.x)
    assert mean_curve([], 20).x == []
