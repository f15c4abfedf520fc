"""Drafts of vLLM's own methods: engine arguments, and on real engines greedy answers in fp32 as without them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import CpuSettings
from rhyme_openrlhf.telemetry.metrics import EngineCounters, acceptance_rate, tokens_per_step
from tests.latency import formula

PROMPTS = 16
HALF = str(embedded.DRAFT_MODEL)


def arguments(monkeypatch: pytest.MonkeyPatch, **drafting: Any) -> dict[str, Any]:
    from rhyme_openrlhf.engine.arguments import speculation_arguments

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    return speculation_arguments(RhymeSettings(drafting=DraftingSettings(**drafting)))


def test_eagle_is_asked_for_as_vllm_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = arguments(monkeypatch, source="eagle3", model="/models/head", tokens=3)
    assert found["speculative_config"] == {"method": "eagle3", "model": "/models/head", "num_speculative_tokens": 3}
    # Else drafts would stay in the worker.
    assert found["async_scheduling"] is False and os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_the_second_runner_is_asked_for_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments(monkeypatch, runner="v2-async")["speculative_config"]["method"] == "custom_class"
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_ngrams_are_looked_up_as_long_as_history_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = arguments(monkeypatch, source="ngram")["speculative_config"]
    defaults = HistoSpecSettings()
    assert (found["prompt_lookup_min"], found["prompt_lookup_max"]) == (defaults.prefix_min, defaults.prefix_max)
    assert "model" not in found


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def engine(request: pytest.FixtureRequest, starts_engine: None) -> Iterator[tuple[str, Any]]:
    from tests.engine.conftest import RunningEngine

    drafting = DraftingSettings(source=request.param, model=HALF if request.param == "draft_model" else "")
    running = RunningEngine(RhymeSettings(drafting=drafting, cpu=CpuSettings(kv_cache_mb=64)))
    if request.param == "ngram":
        # As a run's engine does.
        running.call(running.llm.collective_rpc("rhyme_look_up_serially"))
    yield request.param, running
    running.stop()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded.MODEL)
    rows = [json.loads(line) for line in (embedded.DATA / "mixed_train.jsonl").read_text().splitlines()[:PROMPTS]]
    return [tokenizer(row["input"], add_special_tokens=False)["input_ids"] for row in rows]


def answers(engine: Any, prompts: list[list[int]]) -> tuple[list[list[int]], EngineCounters]:
    from vllm import SamplingParams

    before = EngineCounters.from_dict(engine.scheduler("read_counters"))
    parameters = [SamplingParams(temperature=0, max_tokens=300) for _ in prompts]
    found = [list(out.token_ids) for out in engine.generate(prompts, parameters)]
    return found, EngineCounters.from_dict(engine.scheduler("read_counters")) - before


def test_greedy_output_is_the_same_whole_and_cut(
    engine: tuple[str, Any], plain_engine: Any, prompts: list[list[int]]
) -> None:
    source, drafting = engine
    expected, _ = answers(plain_engine, prompts)
    whole, did = answers(drafting, prompts)
    assert whole == expected
    assert (acceptance_rate(did) or 0) > (0.3 if source == "draft_model" else 0.1)
    assert (tokens_per_step(did) or 0) > 1.1
    # With step times that make draft tokens expensive, few are worth it.
    dear = formula.profile(padded_rows=(), steps=points(0.002))
    assert drafting.scheduler("install_profile", to_text(dear)) == ""
    cut, then = answers(drafting, prompts)
    assert cut == expected
    assert 0 < then.drafted < did.drafted
    decided = drafting.scheduler("take_decisions")
    assert sum(decided["decode_steps"]) > 0 and max(decided["draft_length"]) > 0
    # The profile is wrong about this engine by several times; its own steps say better.
    predicted, real = (
        sum(ms * steps for ms, steps in zip(decided[which], decided["decode_steps"], strict=True))
        for which in ("predicted_ms", "real_ms")
    )
    assert predicted == pytest.approx(real, rel=0.3)
    # Where no draft can be worth it, but for a few beginnings none is verified.
    hopeless = formula.profile(padded_rows=(), steps=points(0.5))
    assert drafting.scheduler("install_profile", to_text(hopeless)) == ""
    answers(drafting, prompts)
    again, then = answers(drafting, prompts)
    assert again == expected
    assert then.drafted < then.decode_tokens / 50


def points(token_seconds: float) -> tuple[Any, ...]:
    """Step times of 10 ms and `token_seconds` for each draft token."""
    from rhyme_openrlhf.latency.profile import StepPoint

    return tuple(
        StepPoint(b, b * each, b * d, 0.010 + token_seconds * b * d, 0.0, 9)
        for b in (1, 16)
        for each in (16, 1024)
        for d in (0, 1, 31)
    )
