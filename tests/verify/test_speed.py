"""Figures of alternating rounds."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.verify.speed import Round, compare


def rounds(seconds: list[float], steps: int, drafted: int = 0) -> list[Round]:
    counters = EngineCounters(
        response_tokens=1000,
        decode_tokens=900,
        decode_steps=steps,
        sample_steps=steps * 3,
        drafted=drafted,
        accepted=drafted // 2,
    )
    return [Round(second, counters) for second in seconds]


def test_the_ratio_is_the_median_round_and_has_its_spread() -> None:
    found = compare(rounds([2.0, 2.0, 3.0], 300), rounds([1.0, 2.0, 1.0], 100, drafted=800))
    assert (found.ratio, found.ratio_low, found.ratio_high) == (2.0, 1.0, 3.0)
    assert (found.plain_tokens_per_second, found.speculating_tokens_per_second) == (500.0, 1000.0)
    assert found.tokens_per_step == 3.0 and found.acceptance_rate == 0.5 and found.speculation_rate == 0.4
    assert found.plain_step_ms == pytest.approx(7000 / 900) and found.speculating_step_ms == pytest.approx(4000 / 300)


def test_rounds_of_one_engine_alone_cannot_be_compared() -> None:
    with pytest.raises(ValueError):
        compare(rounds([1.0], 10), [])
