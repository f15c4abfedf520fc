"""Simulated times of rollouts: steps are counted as by hand, and the slowest engine ends a rollout."""

from __future__ import annotations

import pytest
from rollout_times import times

from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record
from rhyme_openrlhf.latency.step_model import StepModel
from tests.latency import formula

CONTEXT = [1, 2, 3]
LONG = list(range(10, 60))
MODEL = StepModel(formula.profile())


def rollouts(*lengths: int, epochs: int = 1) -> list[list[Record]]:
    """Return the steps of a run with a prompt for each length, one sample each, and a step an epoch."""
    return [
        [Record(f"p{number}", step, (Piece(CONTEXT, LONG[:length], 1.0),)) for number, length in enumerate(lengths)]
        for step in range(epochs)
    ]


def test_without_drafts_each_step_takes_what_the_model_says() -> None:
    (found,) = times(rollouts(3, 5), MODEL, engines=1, drafts=False)
    # The first token of each comes from its prefill.
    expected = [MODEL.seconds(2, 8, 0), MODEL.seconds(2, 10, 0), MODEL.seconds(1, 6, 0), MODEL.seconds(1, 7, 0)]
    # Its own estimate is that it gains nothing.
    assert found == {"seconds": pytest.approx(sum(expected)), "tokens_per_step": 1.0, "estimate": pytest.approx(1.0)}


def test_the_slowest_engine_ends_a_rollout() -> None:
    apart, alone = (times(rollouts(*lengths), MODEL, 2, False)[0]["seconds"] for lengths in ((3, 30), (1, 30)))
    assert apart == alone > 0


def test_a_text_that_comes_again_takes_fewer_steps_with_drafts() -> None:
    first, second = times(rollouts(50, epochs=2), MODEL, engines=1, drafts=True)
    assert second["tokens_per_step"] > 4 * first["tokens_per_step"]
    assert second["seconds"] < first["seconds"] / 2
    # Of one sample, the estimate is the gain.
    (_, plain) = times(rollouts(50, epochs=2), MODEL, engines=1, drafts=False)
    assert second["estimate"] == pytest.approx(plain["seconds"] / second["seconds"], rel=0.1)
