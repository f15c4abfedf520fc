"""Configurations of a sweep: every combination once, the same draws for the same seed, and one sentence a refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.launch.spec import Arguments, SpecError, merged
from rhyme_openrlhf.api.launch.sweep import MAX_RUNS, Configuration, configurations, grid, random_list
from rhyme_openrlhf.settings.varied import Range

BASE: Arguments = {
    "actor": {"model_name_or_path": "org/model"},
    "data": {"prompt_dataset": "org/data"},
    "reward": {"model_name_or_path": "org/reward"},
    "vllm": {"num_engines": 2},
}
ROOTS = [Path("/srv")]
SEEDS = st.lists(st.integers(0, 10**6), min_size=1, max_size=6, unique=True)
RATES = st.lists(st.floats(1e-9, 1e-2), min_size=1, max_size=6, unique=True)


def faults(error: pytest.ExceptionInfo[SpecError]) -> dict[str, str]:
    return {fault.field: fault.message for fault in error.value.faults}


def refused(values: dict[str, Any], base: Arguments = BASE) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        random_list(base, values, 1, 0, ROOTS)
    return faults(error)


@given(SEEDS, RATES)
def test_a_grid_has_every_combination_once(seeds: list[int], rates: list[float]) -> None:
    found = grid(BASE, {"train.seed": seeds, "actor.adam.lr": rates}, ROOTS)
    pairs = [(one.arguments["train"]["seed"], one.arguments["actor"]["adam.lr"]) for one in found]
    assert pairs == [(seed, rate) for seed in seeds for rate in rates]
    assert [tuple(one.differences.values()) for one in found] == pairs
    assert all(one.arguments["actor"]["model_name_or_path"] == "org/model" for one in found)


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.floats(1e-9, 1e-3),
    st.floats(1.001, 1e3),
    st.sampled_from(["linear", "log"]),
    st.integers(1, 20),
    st.integers(0, 2**32),
)
def test_draws_are_different_within_their_ranges_and_follow_the_seed(
    low: int, width: int, rate: float, ratio: float, scale: Any, count: int, seed: int
) -> None:
    whole, real = Range(low + 1, low + 1 + width, scale), Range(rate, rate * ratio, scale)

    def draw() -> list[Configuration]:
        return random_list(BASE, {"train.seed": whole, "actor.adam.lr": real}, count, seed, ROOTS)

    found = draw()
    assert found == draw()
    assert len({tuple(one.differences.items()) for one in found}) == len(found) == count
    for one in found:
        assert type(one.differences["train.seed"]) is int
        assert whole.low <= one.differences["train.seed"] <= whole.high
        assert real.low <= one.differences["actor.adam.lr"] <= real.high


def test_another_seed_draws_others() -> None:
    values = {"actor.adam.lr": Range(1e-7, 1e-5, "log")}
    assert random_list(BASE, values, 5, 1, ROOTS) != random_list(BASE, values, 5, 2, ROOTS)


def test_a_logarithmic_range_has_as_many_draws_in_each_decade() -> None:
    found = random_list(BASE, {"actor.adam.lr": Range(1e-8, 1e-4, "log")}, 400, 0, ROOTS)
    decades = [math.floor(math.log10(one.differences["actor.adam.lr"])) for one in found]
    assert all(70 <= decades.count(decade) <= 130 for decade in (-8, -7, -6, -5))


def test_a_random_list_can_take_all_values_and_no_more() -> None:
    values: dict[str, Any] = {"train.seed": Range(1, 5), "vllm.num_engines": [1, 2]}
    assert len(random_list(BASE, values, 10, 0, ROOTS)) == 10
    with pytest.raises(SpecError, match="only 10 different runs were drawn"):
        random_list(BASE, values, 11, 0, ROOTS)


def test_a_grid_beyond_the_limit_is_refused_before_it_is_made() -> None:
    assert len(grid(BASE, {"train.seed": list(range(MAX_RUNS))}, ROOTS)) == MAX_RUNS
    with pytest.raises(SpecError, match="the grid has 1000000000 runs; a sweep has at most 500"):
        grid(
            BASE,
            {name: list(range(1, 1001)) for name in ("train.seed", "vllm.num_engines", "rollout.batch_size")},
            ROOTS,
        )


@pytest.mark.parametrize("count", [0, MAX_RUNS + 1])
def test_a_count_beyond_the_limit_is_refused(count: int) -> None:
    with pytest.raises(SpecError, match="must be a whole number between 1 and 500"):
        random_list(BASE, {"train.seed": Range(0, 10**6)}, count, 0, ROOTS)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("train.sed", [1], "there is no such option"),
        ("train.seed", [], "needs at least one value"),
        ("train.seed", ["x"], "each value must be a whole number"),
        ("train.seed", [1, 2, 1], "has the value '1' twice"),
        ("actor.adam.lr", [1, 1.0], "has the value '1' twice"),
        ("train.seed", Range(0.5, 3), "each end of the range must be a whole number"),
        ("train.seed", Range(3, 3), "whose low end is below its high end"),
        ("train.seed", Range(0, 3, "log"), "needs a low end above 0"),
        ("actor.adam.lr", Range(-1e308, 1e308), "needs a narrower range"),
        ("histospec.enable", Range(0, 1), "is not one number"),
        ("run.dir", ["/srv/a"], "cannot be given"),
        ("ckpt.path", ["/srv/a"], "cannot differ in a sweep"),
    ],
)
def test_a_refusal_names_the_option(name: str, values: Any, message: str) -> None:
    found = refused({name: values})
    assert list(found) == [f"options.{name}"] and message in found[f"options.{name}"]


def test_all_wrong_options_are_named_at_once_and_none_is_a_fault() -> None:
    assert set(refused({"train.sed": [1], "train.seed": []})) == {"options.train.sed", "options.train.seed"}
    assert set(refused({})) == {"options"}


def test_runs_of_a_sweep_share_no_directory() -> None:
    found = refused({"train.seed": [1]}, merged(BASE, {"ckpt": {"path": "/srv/a"}}))
    assert "all its runs would write there" in found["arguments.ckpt.path"]


def test_a_refused_combination_is_named() -> None:
    base = merged(BASE, {"algo": {"advantage.estimator": "rloo"}})
    with pytest.raises(SpecError) as error:
        grid(base, {"rollout.n_samples_per_prompt": [8, 1]}, ROOTS)
    message = faults(error)["arguments.rollout.n_samples_per_prompt"]
    assert message.startswith("with rollout.n_samples_per_prompt 1: must be at least 2")


def test_values_may_be_written_as_on_the_command_line() -> None:
    listed = configurations(BASE, {"train.seed": "1, 2", "actor.adam.lr": [1e-6]}, None, 0, ROOTS)
    assert [one.differences for one in listed] == [
        {"train.seed": 1, "actor.adam.lr": 1e-6}, {"train.seed": 2, "actor.adam.lr": 1e-6},
    ]  # fmt: skip
    drawn = configurations(BASE, {"actor.adam.lr": "log:1e-7..1e-5"}, 3, 1, ROOTS)
    assert drawn == random_list(BASE, {"actor.adam.lr": Range(1e-7, 1e-5, "log")}, 3, 1, ROOTS)
    with pytest.raises(SpecError) as error:
        configurations(BASE, {"actor.adam.lr": "a..b"}, 3, 1, ROOTS)
    assert "a range is LOW..HIGH" in faults(error)["options.actor.adam.lr"]
