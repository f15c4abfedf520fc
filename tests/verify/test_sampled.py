"""Judging samples: a biased sampler is caught, and so are drafts that were never verified."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from rhyme_openrlhf.engine.messages import Answer
from rhyme_openrlhf.proof.chi_square import chi_square
from rhyme_openrlhf.verify.bench import Prompt
from rhyme_openrlhf.verify.outcome import CheckSkipped
from rhyme_openrlhf.verify.sampled import SAMPLES, Trial, choose_context, judge

MODEL = np.array([0.5, 0.3, 0.15, 0.04, 0.01])


def trial(draft: str, probabilities: np.ndarray, drafted: int = SAMPLES) -> Trial:
    counts = np.random.default_rng(7).multinomial(SAMPLES, probabilities)
    return Trial(draft, 0, drafted, 10, SAMPLES, chi_square(counts.tolist(), MODEL.tolist()))


def test_a_right_sampler_is_ok() -> None:
    assert judge([trial("right", MODEL), trial("adversarial", MODEL)]) == ("ok", "")


@pytest.mark.parametrize("accepted_too_often", [0.05, 0.5])
def test_a_sampler_that_accepts_its_draft_too_often_is_caught(accepted_too_often: float) -> None:
    biased = MODEL * (1 - accepted_too_often) + np.eye(5)[4] * accepted_too_often
    result, why = judge([trial("right", MODEL), trial("adversarial", biased)])
    assert result == "failed" and "with the adversarial draft" in why


def test_the_last_of_two_trials_counts() -> None:
    biased = MODEL[::-1].copy()
    assert judge([trial("right", biased), trial("right", MODEL)])[0] == "ok"
    assert judge([trial("right", biased), trial("right", biased)])[0] == "failed"


def test_drafts_that_were_not_verified_prove_nothing() -> None:
    result, why = judge([trial("right", MODEL, drafted=100)])
    assert result == "failed" and "only 100 of 3000" in why


def test_a_model_whose_probabilities_are_no_numbers_fails() -> None:
    spoilt = Trial("right", 0, 50, 50, 50, chi_square([30, 20], [math.nan, 0.5]))
    assert judge([spoilt])[0] == "failed"


def test_a_certain_model_has_nothing_to_compare() -> None:
    certain = Trial("right", 0, 50, 50, 50, chi_square([50, 0], [1.0, 0.0]))
    assert judge([certain])[0] == "skipped"


def test_the_context_is_where_the_next_token_is_open() -> None:
    prompts = [Prompt("a", (1, 2)), Prompt("b", (3,))]
    chances = [(0.9, 0.9, 0.9), (0.9, 0.8, 0.3)]
    answers = [Answer((5, 6, 7), tuple(map(math.log, row))) for row in chances]
    found = choose_context(prompts, answers)
    assert (found.prompt, found.first) == ((3, 5), 6)
    assert (found.first_probability, found.second_probability) == pytest.approx((0.8, 0.3))
    with pytest.raises(CheckSkipped, match="single token"):
        choose_context(prompts[:1], [Answer((5,), (0.0,))])
