"""Comparing greedy responses: what is unequal is caught, counted and told apart from a near tie in 16 bits."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from rhyme_openrlhf.engine.messages import Answer
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.verify.greedy import compare, judge

DID = EngineCounters(drafted=10, accepted=4)


def answer(*tokens: int, log_prob: float = -0.1) -> Answer:
    return Answer(tokens, (log_prob,) * len(tokens))


def test_equal_responses_are_ok_in_every_format() -> None:
    found = compare("right", [answer(1, 2, 3), answer(4)], [answer(1, 2, 3), answer(4)], DID)
    assert (found.equal_responses, found.equal_tokens, found.tokens, found.largest_gap) == (2, 4, 4, 0.0)
    assert judge([found], "float32") == judge([found], "bfloat16") == ("ok", "")


def test_another_token_fails_in_fp32_and_is_told_in_bf16() -> None:
    found = compare("late", [answer(1, 2, 3), answer(4)], [answer(1, 9, 3, log_prob=-0.6), answer(4)], DID)
    assert (found.equal_responses, found.equal_tokens) == (1, 2)
    assert found.largest_gap == pytest.approx(0.5)
    result, why = judge([found], "float32")
    assert result == "failed" and "1 of 2 responses differ with the late history" in why and "0.5 apart" in why
    assert judge([found], "bfloat16")[0] == "informative"


@pytest.mark.parametrize("tokens", [(1, 2), (1, 2, 3, 4)])
def test_a_response_that_ends_elsewhere_is_unequal(tokens: tuple[int, ...]) -> None:
    found = compare("stale", [answer(1, 2, 3)], [answer(*tokens)], DID)
    assert found.equal_responses == 0 and judge([found], "float32")[0] == "failed"


def test_a_history_that_drafts_nothing_proves_nothing() -> None:
    silent = compare("right", [answer(1, 2)], [answer(1, 2)], EngineCounters())
    result, why = judge([silent], "float32")
    assert result == "failed" and "no draft was verified with the right history" in why
