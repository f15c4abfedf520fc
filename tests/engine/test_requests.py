"""Requests: samples' identities and seeds, random numbers of the start, parameters that vLLM refuses with drafts."""

import asyncio
import inspect
import itertools
import pickle
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.requests import SampleIdentity, request_seed
from rhyme_openrlhf.engine_errors import RefusedParameterError
from rhyme_openrlhf.training.reproducible import in_prompt_order


def test_each_request_has_its_own_seed_and_keeps_it() -> None:
    identities = [
        SampleIdentity(prompt, visit, sample) for prompt in ("a", "b") for visit in (0, 1) for sample in range(8)
    ]
    seeds = [request_seed(run, identity, tokens) for run in (1, 2) for identity in identities for tokens in (5, 9)]
    assert len(set(seeds)) == len(seeds)
    assert request_seed(1, identities[3], 5) == request_seed(1, SampleIdentity("a", 0, 3), 5)


def test_samples_are_ordered_by_prompt_and_stay_together() -> None:
    samples = rows_of(["b", "a", "c"])
    assert [sample.n for sample in in_prompt_order(samples, 2)] == [2, 3, 0, 1, 4, 5]


@pytest.mark.parametrize("labels", ["123", "111"])
def test_rows_with_one_prompt_are_in_the_same_order_whichever_finished_first(labels: str) -> None:
    rows = rows_of(["a", "b", "a", "a"], [*labels[:1], "0", *labels[1:]])
    pairs = [rows[first : first + 2] for first in range(0, 8, 2)]
    orders = {
        tuple(sample.n for sample in in_prompt_order([sample for pair in pairs_so for sample in pair], 2))
        for pairs_so in itertools.permutations(pairs)
    }
    assert len(orders) == 1 and [orders.pop()[0::2][-1]] == [2]


def test_a_prompt_finds_no_cached_block_of_another_weight_version() -> None:
    salts = {requests.prompt_of([1, 2], version)["cache_salt"] for version in (0, 1, 2, 11)}
    assert len(salts) == 4


@pytest.mark.parametrize("stop", [None, ";", [";", "end"]])
def test_text_is_made_where_stop_strings_need_it(stop: Any) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(stop=stop, logprobs=1)
    requests.leave_out_unread(parameters)
    assert parameters.detokenize is bool(stop) and parameters.logprobs == 0


def rows_of(prompts: list[str], labels: list[str] | None = None) -> list[SimpleNamespace]:
    """Two samples of each row; every response is another one."""
    return [
        SimpleNamespace(prompts=[prompt], labels=[label], sequences=torch.tensor([[number, 9 - number]]), n=number)
        for number, (prompt, label) in enumerate(
            (prompt, label) for prompt, label in zip(prompts, labels or prompts, strict=True) for _ in range(2)
        )
    ]


class Engine:
    """An engine that notes the parameters of its requests."""

    def __init__(self, speculates: bool) -> None:
        self.asked: list[Any] = []
        model = SimpleNamespace(get_vocab_size=lambda: 87)
        speculation = object() if speculates else None
        self.vllm_config = SimpleNamespace(model_config=model, speculative_config=speculation)

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[str]:
        self.asked.append(parameters)
        yield "the response"


def test_requests_of_the_start_and_of_checks_leave_the_engines_random_numbers_alone() -> None:
    """vLLM's first model runner draws for each request above temperature 0, its second for each without a seed."""
    engine = Engine(speculates=False)
    asyncio.run(requests.generate_alike(engine, 2, 8, 2, {}, draws=False))
    assert [(one.temperature, one.seed) for one in [*engine.asked, requests.scored()]] == [(0, 0)] * 3


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"min_p": 0.05}, "min_p"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"min_p": 0.1, "logit_bias": {5: 1.0}}, "min_p and logit_bias"),
        ({"trace_decode_token_ids": [5]}, "trace_decode_token_ids"),
    ],
)
def test_a_parameter_that_needs_an_engine_without_drafts_is_named_with_the_flag(
    given: dict[str, Any], named: str
) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(**given)
    plain = Engine(speculates=False)
    assert asyncio.run(requests.generate(plain, None, parameters, "a")) == "the response"
    with pytest.raises(RefusedParameterError) as refused:
        asyncio.run(requests.generate(Engine(speculates=True), None, parameters, "a"))
    # It comes from an engine's process, or from a home's.
    sentence = str(pickle.loads(pickle.dumps(refused.value)))
    assert f"asks for {named} in" in sentence and "--no-histospec.enable" in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"stop": [";"], "stop_token_ids": [3], "min_tokens": 4, "bad_words": ["5"], "allowed_token_ids": [1, 2]},
        {"n": 2, "prompt_logprobs": 1, "seed": 3, "min_p": 0.0},
    ],
)
def test_what_vllm_applies_to_drafts_too_is_not_refused(given: dict[str, Any]) -> None:
    from vllm import SamplingParams

    assert requests.refused(SamplingParams(**given)) == []


def test_vllm_refuses_these_parameters_under_speculation_and_no_others() -> None:
    from vllm import SamplingParams

    refusing = [
        inspect.getsource(method)
        for _, method in inspect.getmembers(SamplingParams, inspect.isfunction)
        if "speculative_config" in inspect.signature(method).parameters
    ]
    # Those that hand it on, and the two that refuse.
    raising = [source for source in refusing if "raise " in source]
    assert len(raising) == 2 and sum("min_p" in source and "self.logit_bias" in source for source in raising) == 1
    assert sum("trace_decode_token_ids is not supported with speculative decoding" in s for s in raising) == 1
