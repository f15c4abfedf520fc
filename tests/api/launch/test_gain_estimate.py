"""The simulated gain of drafts."""

from __future__ import annotations

import dataclasses

import pytest

from rhyme_openrlhf.api.launch import gain_estimate
from rhyme_openrlhf.api.launch.gain_estimate import (
    EPOCHS,
    MOST_SAMPLES,
    STEPS_PER_EPOCH,
    Rollout,
    assumed_lengths,
    estimate,
)
from tests.latency import formula

SMALL = Rollout(2, 1, 12, 8, "budget")


def test_drafts_are_faster_where_verifying_costs_little() -> None:
    found = estimate(SMALL, assumed_lengths(256), formula.profile())
    assert found.ratio > 1.1 and found.tokens_per_step > 1
    assert (found.engines, found.prompts) == (2, 12)
    assert estimate(SMALL, assumed_lengths(256), formula.profile()) == found


def test_drafts_gain_nothing_where_every_token_costs_a_step() -> None:
    steps = tuple(
        dataclasses.replace(one, seconds=0.01 * (one.running + one.drafts)) for one in formula.profile().steps
    )
    found = estimate(SMALL, assumed_lengths(256), formula.profile(steps=steps, padded_rows=()))
    assert found.ratio == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("engines", "prompts", "samples"), [(64, 1024, 16), (1, 4096, 64), (3, 7, 5), (512, 512, 1)])
def test_a_large_run_is_simulated_in_part(engines: int, prompts: int, samples: int) -> None:
    part_engines, part_prompts = gain_estimate._part(Rollout(engines, 1, prompts, samples, "window"))
    assert 1 <= part_engines <= engines and 1 <= part_prompts <= prompts
    assert part_prompts * samples * EPOCHS * STEPS_PER_EPOCH <= MOST_SAMPLES
    if part_engines > 1 or part_prompts == prompts:
        # Each engine has about as many samples as it would have.
        assert part_prompts / part_engines == pytest.approx(prompts / engines, rel=0.5)


def test_another_tensor_parallel_size_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="no profile of --tp 2"):
        estimate(dataclasses.replace(SMALL, tensor_parallel=2), assumed_lengths(64), formula.profile())
