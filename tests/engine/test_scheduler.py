"""Drafting in vLLM's real scheduler, without an engine: one path for all requests, in every mix."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step_overhead import scheduler_of
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.gain import GainMeter
from rhyme_openrlhf.engine.requests import PROMPT_KEY
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.latency import formula

PROMPT, RESPONSE = [1, 2, 3], list(range(10, 60))


class Grammar:
    """Allows what is below 13 only."""

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token < 13]


class Engine:
    """The scheduler with requests that sample what they are told to."""

    def __init__(self, **requests: str | None) -> None:
        """`requests`: the prompt key of each."""
        self.scheduler = scheduler_of("rules", 8, 512)
        self.drafting = self.scheduler.drafting
        # The window alone says how long a draft is.
        self.drafting.use(HistoryDrafter(HistoSpecSettings(extend_confidence=1, stop_confidence=0)))
        self.drafting.gain = GainMeter(0)
        self.drafting.source.install("p", build_index([Piece(PROMPT, RESPONSE, 1.0)]))
        for name, key in requests.items():
            parameters = SamplingParams(temperature=1, max_tokens=100, extra_args={PROMPT_KEY: key} if key else {})
            parameters.update_from_generation_config({}, eos_token_id=None)
            self.scheduler.add_request(Request(name, PROMPT, parameters, None))

    def step(self, **sampled: list[int]) -> dict[str, list[int]]:
        """A step in which each request sampled these tokens; returns the drafts for the next one."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        new = [sampled[name] for name in names]
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, places, new))
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[] for _ in names]))
        return {name: request.spec_token_ids for name, request in self.scheduler.requests.items()}


def test_drafts_follow_what_steps_sampled() -> None:
    engine = Engine(a="p", b="p")
    assert engine.step(a=[10], b=[10]) == {"a": [11, 12], "b": [11, 12]}
    # One draft was accepted whole, the other's first token was not.
    assert engine.step(a=[11, 12, 13], b=[40]) == {"a": [14, 15, 16, 17], "b": []}
    assert engine.step(a=[14, 50], b=[41]) == {"a": [], "b": [42, 43]}


def test_requests_without_a_key_or_with_a_grammar_change_nothing_for_the_others() -> None:
    engine = Engine(a="p", keyless=None, ruled="p", b="p")
    ruled = engine.scheduler.requests["ruled"]
    structured = SimpleNamespace(grammar=Grammar(), reasoning_ended=True)
    # A grammar of its own would have to be compiled: what the scheduler asks of one is all there is.
    engine.step(a=[10], keyless=[10], ruled=[10], b=[10])
    ruled.structured_output_request = structured
    engine.drafting._ruled.add("ruled")
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["a", "keyless", "ruled", "b"], [[]] * 4))
    drafts = {name: request.spec_token_ids for name, request in engine.scheduler.requests.items()}
    assert drafts == {"a": [11, 12], "keyless": [], "ruled": [11, 12], "b": [11, 12]}
    ruled.append_output_token_ids([11, 12])
    engine.drafting.source.append(["ruled"], [[11, 12]])
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["ruled", "a"], [[]] * 2))
    assert ruled.spec_token_ids == [] and engine.scheduler.requests["a"].spec_token_ids == [11, 12]


def test_only_requests_that_decode_are_drafted_for() -> None:
    engine = Engine(a="p", b="p", c="p")
    engine.step(a=[10], b=[10], c=[10])
    requests: dict[str, Any] = engine.scheduler.requests
    for request in requests.values():
        request.spec_token_ids = []
    requests["b"].is_prefill_chunk = True
    requests["c"].status = RequestStatus.PREEMPTED
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["gone", "c", "b", "a"], [[]] * 4))
    assert {name: request.spec_token_ids for name, request in requests.items()} == {"a": [11, 12], "b": [], "c": []}


def test_a_request_that_ends_is_forgotten_with_its_last_tokens() -> None:
    engine = Engine(a="p", b="p")
    engine.step(a=[10], b=[10])
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.step(b=[11]) == {"b": [12, 13]}
    with pytest.raises(KeyError, match="request a has not started"):
        engine.drafting.source.window("a")


def test_drafting_is_timed_once() -> None:
    """What drafting takes is part of the busy time, and not twice."""
    engine = Engine(a="p")
    engine.step(a=[10])
    counted = engine.scheduler.meter.read_counters()
    assert 0 < counted["draft_seconds"] < counted["busy_seconds"]


def test_the_gain_is_told_the_overhead_that_the_profile_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(a="p", b="p")
    told: list[float] = []
    monkeypatch.setattr(engine.drafting.gain, "step", lambda *step: told.append(step[-1]) or "")
    assert engine.drafting.install_profile(to_text(formula.profile(unspeculated=formula.unspeculated(0.8)))) == ""
    for token in range(10, 15):
        engine.step(a=[token], b=[token])
    assert told and told == pytest.approx([1 / 0.8] * len(told))
    told.clear()
    # One without such steps: nothing is known, so the engine is compared with itself.
    assert engine.drafting.install_profile(to_text(formula.profile())) == ""
    for token in range(15, 20):
        engine.step(a=[token], b=[token])
    assert told and set(told) == {1.0}


def test_a_weight_check_goes_before_samples_that_wait() -> None:
    """A check behind hundreds of waiting samples would keep the trainer waiting for most of a rollout."""
    from rhyme_openrlhf.engine.requests import scored

    engine = Engine(**{f"s{number}": None for number in range(9)})
    engine.step(**{f"s{number}": [10] for number in range(8)})
    for name in ("s9", "s10"):
        parameters = SamplingParams(temperature=1, max_tokens=100)
        parameters.update_from_generation_config({}, eos_token_id=None)
        engine.scheduler.add_request(Request(name, PROMPT, parameters, None))
    engine.scheduler.add_request(Request("check", PROMPT, scored(), None))
    engine.scheduler.finish_requests("s3", RequestStatus.FINISHED_ABORTED)
    assert list(engine.scheduler.schedule().num_scheduled_tokens)[-1] == "check"
    assert engine.scheduler.requests["s8"].status == RequestStatus.WAITING
