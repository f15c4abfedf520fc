"""The parts of vLLM that moves rely on: a changed upstream must fail here, not in a run."""

from __future__ import annotations

import inspect

import pytest
from transformers import AutoTokenizer

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.messages import ARRIVED, Arrival, Progress

pytest.importorskip("vllm.v1.engine.core")


def test_the_worker_makes_the_state_of_a_new_request_by_the_name_we_replace() -> None:
    import vllm.v1.worker.gpu_model_runner as runner
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    source = inspect.getsource(runner.GPUModelRunner._update_states)
    assert source.count("req_state = CachedRequestState(") == 1
    made = source.split("req_state = CachedRequestState(")[1].split(")\n")[0]
    for name in ("sampling_params=", "generator=", "output_token_ids=[]"):
        assert name in made
    # It adds the response tokens it is given, as of a request that goes on after a preemption.
    assert "output_token_ids" in CachedRequestState.__dataclass_fields__


def test_a_request_that_brings_nothing_is_made_as_ever() -> None:
    import torch
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.patches.resumed_requests import generator_bytes, request_state

    others = {
        "req_id": "a", "prompt_token_ids": [1, 2], "mm_features": [], "block_ids": ([0],), "num_computed_tokens": 0,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    plain = request_state(sampling_params=SamplingParams(), generator=generator, output_token_ids=[], **others)
    assert plain.output_token_ids == [] and plain.num_tokens == 2

    elsewhere = torch.Generator().manual_seed(9)
    torch.rand(3, generator=elsewhere)
    arrival = Arrival((5, 6, 7), "room", 4, generator_bytes(elsewhere))
    parameters = SamplingParams(extra_args={ARRIVED: arrival.to_plain()})
    assert Arrival.of(parameters) == arrival and Arrival.of(SamplingParams()) is None
    came = request_state(sampling_params=parameters, generator=generator, output_token_ids=[], **others)
    assert came.output_token_ids == [5, 6, 7] and (came.num_prompt_tokens, came.num_tokens) == (2, 5)
    assert torch.equal(torch.rand(4, generator=came.generator), torch.rand(4, generator=elsewhere))


@pytest.mark.parametrize("seam", range(1, 5))
def test_a_stop_string_is_found_across_the_seam(seam: int) -> None:
    """The destination's frontend sees text that the source's did: the same string stops it, at the same token."""
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

    from rhyme_openrlhf.engine.patches.resumed_outputs import fill, generated

    tokenizer = AutoTokenizer.from_pretrained(embedded.MODEL)
    prompt, text = tokenizer.encode("12+3="), "15;27;39"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text and len(tokens) > 6

    def state() -> RequestState:
        parameters = SamplingParams(stop=["5;27"], logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
        request = EngineCoreRequest(
            request_id="a", external_req_id="a", prompt_token_ids=prompt, mm_features=None, sampling_params=parameters,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        return RequestState.from_new_request(
            tokenizer=tokenizer, request=request, prompt=None, parent_req=None, request_index=0, queue=None,
            log_stats=False, stream_interval=1,
        )  # fmt: skip

    def stops_at(begun: RequestState, first: int) -> tuple[int, str]:
        for number, token in enumerate(tokens[first:], first):
            if begun.detokenizer.update([token], False):
                return number, begun.detokenizer.output_text
        raise AssertionError("no stop string was found")

    expected = stops_at(state(), 0)
    # The source has not stopped by then.
    assert expected[0] >= seam
    log_probs = [{token: Logprob(-0.5)} for token in tokens[:seam]]
    moved = state()
    fill(moved, Progress(tuple(tokens[:seam]), log_probs))
    assert generated(moved) == (tuple(tokens[:seam]), log_probs)
    assert moved.logprobs_processor.cumulative_logprob == -0.5 * seam
    assert stops_at(moved, seam) == expected
