"""Engine actors on real engines, without Ray, and other weights for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.engine import CpuSettings, EngineSettings
from rhyme_openrlhf.weights.buckets import Parameter, Segment, plan_buckets
from rhyme_openrlhf.weights.node import SegmentStore

# Tokens of a response that still runs when something is done to its engine: seconds.
LONG = 700


class Actor:
    """RhymeRolloutActor with the parts that its settings ask for, and its event loop in a thread."""

    def __init__(self, **settings: Any) -> None:
        from rhyme_openrlhf.engine.actor import RhymeRolloutActor
        from rhyme_openrlhf.engine.factory import parts_of

        cpu, size = CpuSettings(kv_cache_mb=64), EngineSettings(100, 3000)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.raw = RhymeRolloutActor.__new__(RhymeRolloutActor)
        self.call(
            self.raw.__init__(
                model=str(embedded.MODEL), max_model_len=768, enforce_eager=True, tensor_parallel_size=1, num_gpus=0,
                enable_prefix_caching=True, distributed_executor_backend="uni", logprobs_mode="processed_logprobs",
                max_logprobs=1, bundle_indices=None,
                rhyme=RhymeSettings(cpu=cpu, engine=size, **settings), run_seed=1, index=0, history_workers=[],
                parts=parts_of,
            )
        )  # fmt: skip
        # Before anything is asked of it.
        self.had_requests = self.raw.llm.output_handler is not None
        self.counted = self.call(self.raw.totals())

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(240)

    def start(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


@contextmanager
def an_actor(**settings: Any) -> Iterator[Actor]:
    """An engine for some tests."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            # Upstream asks Ray, which is not there, for its address unless it is known.
            "RAY_ADDRESS": "not-asked",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }.items():
            environment.setenv(name, value)
        found = Actor(**settings)
        yield found
        found.raw.llm.shutdown()


class MadeUpWorker:
    """Stands for a history worker: has an index for each key, and notes what it is asked."""

    def __init__(self, indexes: dict[str, Any]) -> None:
        self.indexes = indexes
        self.asked: list[str] = []

    @property
    def index(self) -> Any:
        async def answer(key: str) -> Any:
            self.asked.append(key)
            return self.indexes.get(key)

        return SimpleNamespace(remote=answer)


def model_with(scale: float) -> Any:
    """The embedded model in fp32 with scaled weights: other log-probabilities, and other values in the KV cache.

    The values must differ, because a cached block of other weights would go unnoticed otherwise.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded.MODEL, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(scale)
    return model


def stored(model: Any, version: int, folder: Path) -> Segment:
    import torch

    tensors = dict(model.named_parameters())
    parameters = [
        Parameter(name, tuple(tensor.shape), "float32", tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    ]
    arrays, buckets = [], []
    for bucket in plan_buckets(parameters, 1 << 20, 1):
        array = np.zeros(bucket.nbytes, dtype=np.uint8)
        for entry in bucket.entries:
            raw = tensors[entry.parameter.name].detach().contiguous().view(-1).view(torch.uint8).numpy()
            array[entry.offset : entry.offset + raw.size] = raw
        arrays.append(array)
        buckets.append(bucket)
    return SegmentStore(buckets, folder).store(version, arrays)
