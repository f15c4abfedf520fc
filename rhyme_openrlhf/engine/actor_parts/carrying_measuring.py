"""What an engine actor can do to have carrying measured: KV blocks to another engine, weights into this one.

Both go the ways that a run's go: blocks through a new buffer in the node's shared memory (kv/), written by
every tensor-parallel rank and read again, one after the other; weights through a segment there (weights/node).

Invariants: done while no sample runs; blocks and weights are the same afterwards as before.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rhyme_openrlhf.engine.actor_parts.measuring import StepMeasuring
from rhyme_openrlhf.kv.buffer import KvBufferStore, KvLayout
from rhyme_openrlhf.weights.buckets import (
    Bucket,
    Parameter,
    Segment,
    WeightVersion,
    plan_buckets,
)
from rhyme_openrlhf.weights.node import SegmentStore, WeightSpaceError

# Enough for a median; the first of each is not counted, because memory is allocated and code is loaded in it.
REPEATS = 5


class CarryingMeasuring(StepMeasuring):
    """Mixed into an engine actor whose workers have engine/worker.py."""

    weight_version: int
    load_weights: Any

    async def kv_bandwidth(self) -> tuple[float, str]:
        """Bytes a second that one rank sends one way (PAT 4.3, B_net^uni), for the longest context; or 0 and why not.

        Orders to the workers are in it, as in a move.
        """
        layout = (await self.llm.collective_rpc("rhyme_kv_layout"))[0]
        if isinstance(layout, str):
            return 0.0, layout
        limits, size = await self.limits(), layout["block_size"]
        # Block 0 is vLLM's null block.
        count = min(-(-limits.length // size), limits.kv_cache_tokens // size - 1)
        blocks, store, seconds = list(range(1, 1 + count)), KvBufferStore(), []
        for _ in range(1 + REPEATS):
            buffer = store.make(KvLayout(**layout), count)
            try:
                began = time.perf_counter()
                for order in ("rhyme_export_kv", "rhyme_import_kv"):
                    said = await self.llm.collective_rpc(order, args=(blocks, buffer.to_plain(), 0))
                    if refused := next(filter(None, said), ""):
                        return 0.0, refused
                seconds.append(time.perf_counter() - began)
            finally:
                store.remove(buffer)
        return count * size * await self.kv_bytes_per_token() / statistics.median(seconds[1:]), ""

    async def weight_load(self) -> tuple[float, str]:
        """Seconds until this engine runs a weight version that lies in the node's shared memory; or 0 and why not."""
        store = SegmentStore()
        try:
            segment = await asyncio.to_thread(self._segment_of_checkpoint, store)
            seconds = [await self.load_weights(segment) for _ in range(1 + REPEATS)]
        except (OSError, ValueError, WeightSpaceError) as error:
            return 0.0, str(error).splitlines()[0]
        finally:
            store.close()
        return statistics.median(seconds[1:]), ""

    def _segment_of_checkpoint(self, store: SegmentStore) -> Segment:
        """The model's own weights, in the engine's number format, as a policy publishes them."""
        from transformers import AutoModelForCausalLM

        config = self.llm.vllm_config.model_config
        model = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code
        )
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        described = [
            Parameter(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.numel() * t.element_size())
            for name, t in tensors.items()
        ]
        # A bucket for each parameter, so that no more than one is packed at a time.
        buckets = plan_buckets(described, 1, 1)
        version = WeightVersion(self.weight_version, buckets)
        return store.store(version, _packed(buckets, tensors))


def _packed(buckets: tuple[Bucket, ...], tensors: dict[str, torch.Tensor]) -> Iterator[np.ndarray]:
    for bucket in buckets:
        (entry,) = bucket.entries
        packed = np.zeros(bucket.nbytes, dtype=np.uint8)
        raw = tensors[entry.parameter.name].contiguous().view(-1).view(torch.uint8).numpy()
        packed[: raw.size] = raw
        yield packed
