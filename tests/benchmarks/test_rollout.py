"""Ratios and intervals of the rollout and first-epoch benchmarks."""

from __future__ import annotations

import pytest

pytest.importorskip("openrlhf")

import first_epoch
import rollout


def steps(*seconds: float) -> rollout.Steps:
    """Steps of 1000 tokens whose rollout takes these seconds, and all other parts one second each."""
    return [
        {"step": number, "tokens": 1000, "parts": {"rollout": one, "experience": 1.0, "train": 1.0, "sync": 1.0}}
        for number, one in enumerate(seconds, start=1)
    ]


def test_ratios_are_of_the_same_seed_and_of_the_chosen_steps() -> None:
    runs = [
        {"arm": "openrlhf", "seed": 1, "steps": steps(4, 8)},
        {"arm": "on", "seed": 1, "steps": steps(4, 2)},
        {"arm": "on", "seed": 2, "steps": steps(1, 1)},
    ]
    found = rollout.ratios(runs, "on", "openrlhf", slice(1, None))
    assert found["rollout"] == [4.0]
    assert found["step"] == found["step tokens"] == [pytest.approx(11 / 5)]
    assert rollout.ratios(runs, "on", "openrlhf", slice(0, 1))["rollout"] == [1.0]


@pytest.mark.parametrize(("values", "words"), [([1.3], "a 0% interval"), ([1.1, 1.2, 1.4], "a 75% interval")])
def test_an_interval_says_how_sure_it_is(values: list[float], words: str) -> None:
    text = rollout.interval(values)
    assert words in text and f"({min(values):.2f} to {max(values):.2f}" in text


def test_the_order_of_arms_turns_with_every_seed() -> None:
    done = [(run["arm"], run["seed"]) for run in rollout.run_arms({"a": (), "b": ()}, [1, 2], lambda *_: [])]
    assert done == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]


def test_only_arms_that_run_are_compared() -> None:
    found = first_epoch.comparisons(["openrlhf", "on"], per_epoch=4)
    assert {(arm, peer) for arm, peer, _, _ in found} == {("on", "openrlhf")}
    assert [steps for _, _, _, steps in found] == [slice(0, 4), slice(4, None), slice(None)]
