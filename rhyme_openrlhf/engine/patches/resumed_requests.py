"""A patch: a request that is new to a vLLM worker may bring response tokens and a generator's state.

vLLM's first model runner (V1: with speculation, and always on CPU) takes every new request for one without a response.
It keeps a `CachedRequestState` of each, which can hold a response: that of a preempted request does. So only the name
by which the runner makes one is replaced. The other runner (V2) takes the tokens from the scheduler by itself; with it
nothing here is called. Checked against vLLM 0.29.0 and 0.32.0 `v1/worker/gpu_model_runner.py::_update_states`; contract
test: `tests/engine/patches/test_contracts.py`.

Invariants:
- Requests that bring nothing are made as ever.
- Penalties, min_tokens and stop conditions of a resumed request see its response tokens as response, not as prompt.
- A seeded generator continues from its state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu_model_runner as runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rhyme_openrlhf.engine.messages import Arrival


def request_state(*, sampling_params: Any, generator: Any, output_token_ids: list[int], **others: Any) -> Any:
    """Stands for `CachedRequestState(...)` where the runner meets a new request."""
    arrival = Arrival.of(sampling_params)
    if arrival is not None:
        output_token_ids = list(arrival.tokens)
        if generator is not None and arrival.generator is not None:
            generator.set_state(generator_state(arrival.generator))
    return CachedRequestState(
        sampling_params=sampling_params, generator=generator, output_token_ids=output_token_ids, **others
    )


def generator_state(state: bytes) -> torch.Tensor:
    """Return the bytes of `generator_bytes` as torch's generators take them."""
    return torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy())


def generator_bytes(generator: torch.Generator) -> bytes:
    """Return a generator's state, so that another of the same device type goes on alike."""
    return generator.get_state().numpy().tobytes()


def apply() -> None:
    """Replace the name in this process."""
    runner.CachedRequestState = request_state
