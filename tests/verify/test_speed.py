"""Figures of alternating rounds."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from rhyme_openrlhf.engine.messages import Answer, Request
from rhyme_openrlhf.history.index import DraftIndex
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.verify import speed
from rhyme_openrlhf.verify.bench import Prompt
from rhyme_openrlhf.verify.engines import EngineFacts, EnginePair
from rhyme_openrlhf.verify.speed import ROUNDS, Round, compare


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


class Engine:
    """Answers every request with the same three tokens, in as many decode steps as it is asked to."""

    def __init__(self, steps: int, calls: list[Any]) -> None:
        self._steps = steps
        self._calls = calls
        self._done = EngineCounters()
        self.installed: dict[str, Any] = {}
        self.facts = EngineFacts("float32", async_scheduling=True, speculates=False, model_runner="V2")

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        self._calls.append((self, requests))
        assert {request.history for request in requests} <= {*self.installed, ""}
        self._done += EngineCounters(
            response_tokens=3 * len(requests), decode_tokens=2 * len(requests), decode_steps=self._steps,
            sample_steps=self._steps * len(requests),
        )  # fmt: skip
        return [Answer((7, 8, 9), (-0.1, -0.1, -0.1)) for _ in requests]

    def counters(self) -> EngineCounters:
        return self._done

    def install(self, history: str, index: Any) -> None:
        assert DraftIndex.from_buffer(index)
        self.installed[history] = index

    def forget(self, history: str) -> None:
        del self.installed[history]


def test_engines_take_turns_on_the_users_prompts_and_only_one_drafts(args: Any) -> None:
    calls: list[Any] = []
    plain, speculating = Engine(2, calls), Engine(1, calls)
    prompts = tuple(Prompt(f"p{number}", (1, 2, 3, number)) for number in range(3))
    bench: Any = SimpleNamespace(
        inputs=SimpleNamespace(args=args, prompts=prompts, settings=RhymeSettings()),
        run_pair=lambda: EnginePair(plain, speculating),
        say=lambda text: None,
        room=lambda prompt, most: most,
        context=7,
    )
    outcome = speed.run(bench)

    # A first round for the history, a short one to warm up, then in turn.
    assert [engine for engine, _ in calls] == [plain, speculating, *[plain, speculating] * ROUNDS]
    samples = args.rollout.n_samples_per_prompt
    assert [len(requests) for _, requests in calls] == [3 * samples, samples, *[3 * samples] * 2 * ROUNDS]
    for engine, requests in calls:
        assert all(bool(request.history) == (engine is speculating) for request in requests)
    assert speculating.installed == {} and plain.installed == {}
    assert outcome.result == "informative" and "upper bound" in outcome.why
    assert outcome.figures["tokens_per_step"] == 2.0 and len(outcome.figures["rounds"]["plain"]) == ROUNDS
    assert outcome.figures["async_scheduling_without_speculation"] is True


def test_the_report_says_what_vllm_chose_for_each_engine(args: Any) -> None:
    calls: list[Any] = []
    plain, speculating = Engine(2, calls), Engine(1, calls)
    speculating.facts = EngineFacts("float32", async_scheduling=False, speculates=True, model_runner="V1")
    bench: Any = SimpleNamespace(
        inputs=SimpleNamespace(args=args, prompts=(Prompt("p", (1, 2, 3)),), settings=RhymeSettings()),
        run_pair=lambda: EnginePair(plain, speculating),
        say=lambda text: None,
        room=lambda prompt, most: most,
        context=7,
    )
    outcome = speed.run(bench)
    assert outcome.lines[-1] == (
        "with drafts: model runner V1, synchronous scheduling; without: model runner V2, asynchronous scheduling"
    )
    assert outcome.figures["engines"]["plain"]["model_runner"] == "V2"
    assert outcome.figures["engines"]["speculating"]["async_scheduling"] is False
