"""Drawn workloads."""

from __future__ import annotations

import dataclasses

import pytest

from rhyme_openrlhf.simulation.workload import PRESETS, drawn

SHAPE = PRESETS["rhymerl-math"]


def test_every_epoch_has_each_prompt_once_and_the_seed_decides() -> None:
    load = drawn(SHAPE, 6, 5, 3, 2, seed=4)
    assert [step.epoch for step in load.steps] == [1, 1, 2, 2, 3, 3]
    for epoch in (1, 2, 3):
        assert sorted(p.prompt for s in load.steps if s.epoch == epoch for p in s.prompts) == list(range(10))
    assert load == drawn(SHAPE, 6, 5, 3, 2, seed=4) != drawn(SHAPE, 6, 5, 3, 2, seed=5)
    assert all(1 <= length <= SHAPE.longest for s in load.steps for p in s.prompts for length in p.lengths)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        dataclasses.replace(SHAPE, median=0)
    with pytest.raises(ValueError, match="within lies between"):
        dataclasses.replace(SHAPE, within=2)
