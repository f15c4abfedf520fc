"""A patch: responses with stop strings end at the same token with and without drafts.

With speculation a decode step gives a request several tokens. vLLM's frontend appends all of them before it looks for a
stop string, and then truncates the text alone. Token ids and log-probabilities behind the stop string stay, and
OpenRLHF trains on them. Here the frontend gets such a step as steps of one token each. It finishes the request at
the token that completes a stop string, and ignores the rest of the step, as it ignores all tokens of a request that has
finished. So ids, log-probabilities, text, finish reason and stop reason are those of an engine without speculation,
for responses, streams and vLLM's OpenAI server alike.

All other ends (end-of-sequence and stop tokens, length limits, repetition) vLLM's scheduler decides token by token.

Checked against vLLM 0.29.0 `v1/engine/output_processor.py`, `v1/engine/detokenizer.py`; test:
`tests/engine/patches/test_single_tokens.py`.

Invariant: outputs of requests without stop strings, and of one token, are passed on as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec


def install(llm: Any) -> None:
    """Have one vLLM AsyncLLM's frontend take the tokens of requests with stop strings one by one."""
    processor = llm.output_processor
    process = processor.process_outputs

    def process_outputs(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        states = processor.request_states
        split = [one for output in outputs for one in _parts(output, states.get(output.request_id))]
        processed = process(split, *args, **kwargs)
        if len(split) > len(outputs) and processed.reqs_to_abort:
            # The scheduler has ended these by itself, behind the stop string.
            over = {output.request_id for output in outputs if output.finished}
            processed.reqs_to_abort = [name for name in processed.reqs_to_abort if name not in over]
        return processed

    processor.process_outputs = process_outputs


def _parts(output: Any, state: Any) -> list[Any]:
    """Return a step's output for one request as outputs of one token each, if stop strings are looked for."""
    if len(output.new_token_ids) < 2 or state is None or not getattr(state.detokenizer, "stop", None):
        return [output]
    return single_tokens(output)


def single_tokens(output: Any) -> list[Any]:
    """Return an EngineCoreOutput as one for each of its tokens.

    What belongs to a token goes with it, what came before the tokens with the first, and how they ended with the last.
    """
    last = len(output.new_token_ids) - 1
    log_probs, mask, experts = output.new_logprobs, output.new_sampling_mask, output.routed_experts
    by_token = experts is not None and len(experts) == last + 1
    parts = []
    for number, token in enumerate(output.new_token_ids):
        part = msgspec.structs.replace(
            output,
            new_token_ids=[token],
            new_logprobs=None if log_probs is None else log_probs.slice_request(number, 1),
            new_sampling_mask=None if mask is None else mask.slice_request(number, 1),
        )
        if by_token:
            part.routed_experts = experts[number : number + 1]
        if number > 0:
            part.new_prompt_logprobs_tensors = part.prefill_stats = part.events = part.mm_cache_miss_hashes = None
            part.num_nans_in_logits = 0
            if not by_token:
                part.routed_experts = None
        if number < last:
            part.finish_reason = part.stop_reason = part.spec_decode_metrics = None
            part.kv_transfer_params = part.ec_transfer_params = None
        parts.append(part)
    return parts
