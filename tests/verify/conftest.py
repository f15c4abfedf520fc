"""Shared by the tests of checks: a stand-in for parsed arguments, as upstream nests them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def args() -> Any:
    """Arguments of a run of one policy rank, as far as the checks read them."""
    return SimpleNamespace(
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=1),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1, param_dtype="bf16"),
        rollout=SimpleNamespace(
            micro_batch_size=8, n_samples_per_prompt=8, batch_size=12, max_new_tokens=512, temperature=1.0, top_p=1.0
        ),
        train=SimpleNamespace(micro_batch_size=8),
        data=SimpleNamespace(prompt_probs=None, max_len=768, max_images_per_prompt=0),
        vllm=SimpleNamespace(num_engines=2),
    )
