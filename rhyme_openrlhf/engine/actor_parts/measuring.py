"""Measurements of an engine: its decode steps, prefills, and transfers of KV blocks and weights to it.

A run without a profile measures its first engine, and `rhyme profile` one of its own. Transfers go the ways that a
run's go. Blocks pass through a new buffer in the node's shared memory (kv/): every tensor-parallel rank writes them,
then reads them, one rank after the other. Weights pass through a segment there (weights/node).

Invariants:
- Measuring happens while no sample runs, and leaves no trace in the engine's counters.
- Scheduler, blocks and weights end as they were.
- Requests sample at temperature 1, as runs do, and stop only at the length asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rhyme_openrlhf.engine import requests
from rhyme_openrlhf.engine.actor_parts import unspeculated_steps
from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.arguments import filling_arguments, speculation_arguments
from rhyme_openrlhf.engine.calls import SchedulerDrafting, SchedulerTiming, WorkerCalls
from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.kv.buffer import KvBufferStore, KvLayout
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import Limits, PrefillShape, StepShape
from rhyme_openrlhf.latency.profile import Subject
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.weights.buckets import Bucket, Parameter, plan_buckets
from rhyme_openrlhf.weights.node import SegmentStore, WeightSpaceError

# Enough for a median; the first of each is not counted, because memory is allocated and code is loaded in it.
REPEATS = 5


class Measuring(Part):
    """`fills`: contexts of decode steps are filled instead of computed, where the engine speculates.

    An engine without speculation has nothing that serves measuring, because a connector could keep vLLM from the model
    runner and graphs it would take else.
    """

    def __init__(self, engine: Engine, fills: bool = False) -> None:
        super().__init__(engine)
        self._fills = fills and engine.rhyme.histospec.enable
        self._unspeculated = unspeculated_steps.Unspeculated()
        self._step_times = ""

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments for the connector that fills contexts, if they are filled."""
        return filling_arguments() if self._fills else {}

    async def before_start(
        self, arguments: dict[str, Any], start: Callable[[RhymeSettings, dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Measure an engine without speculation, if a run's first engine is to."""
        rhyme = self.engine.rhyme
        if unspeculated_steps.are_wanted(rhyme, self.engine.index, arguments):
            plain = dataclasses.replace(rhyme, histospec=dataclasses.replace(rhyme.histospec, enable=False))
            begin = partial(start, plain, speculation_arguments(plain))
            self._unspeculated = await unspeculated_steps.measured(self, begin)

    async def subject(self) -> Subject:
        """Return what a profile of this engine is of."""
        config = self.engine.llm.vllm_config
        hardware = (await self.engine.workers(WorkerCalls.rhyme_hardware))[0]
        return Subject(
            model=profiles.model_name(config.model_config.hf_config, self.engine.rhyme.drafting),
            hardware=hardware,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        )

    async def limits(self) -> Limits:
        """Return what this engine can hold."""
        config = self.engine.llm.vllm_config
        drafts = config.speculative_config
        return Limits(
            running=config.scheduler_config.max_num_seqs,
            length=config.model_config.max_model_len,
            kv_cache_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            step_tokens=config.scheduler_config.max_num_scheduled_tokens
            or config.scheduler_config.max_num_batched_tokens,
            drafts_each=drafts.num_speculative_tokens if drafts else 0,
            verified_rows=await self.engine.scheduler(SchedulerDrafting.row_limit) if drafts else None,
        )

    async def kv_bytes_per_token(self) -> int:
        """Return the bytes of a token's KV cache, as in `latency/profile.py`."""
        config, subject = self.engine.llm.vllm_config.model_config.hf_config, await self.subject()
        return profiles.kv_bytes_per_token(config, subject.dtype, subject.tensor_parallel_size)

    async def padded_rows(self) -> tuple[int, ...]:
        """Return the token counts to which a step is padded, ascending: as the worker has resolved them."""
        return tuple((await self.engine.workers(WorkerCalls.rhyme_padded_rows))[0])

    # --- steps

    async def decode_steps(self, shape: StepShape, steps: int) -> list[tuple[int, int, int, float]]:
        """Run `steps` decode steps of this shape; return (running, context, drafts, seconds) of those that had it."""
        scheduler = self.engine.scheduler
        await scheduler(SchedulerTiming.force_drafts, shape.drafts_each)
        try:
            await scheduler(SchedulerTiming.take_steps)
            # The first step of a request is its prefill (of one token), the last one has no next to be timed by.
            tokens = 2 + steps
            if not self._fills:
                # Contexts are computed: the first samples have to wait for the last ones', decoding meanwhile.
                computed = shape.running * shape.context_each
                tokens += 2 * -(-computed // (await self.limits()).step_tokens) * (1 + shape.drafts_each // 8)
            filled = {requests.FILLED: True} if self._fills else {}
            await requests.generate_alike(self.engine.llm, shape.running, shape.context_each, tokens, filled)
            found = await scheduler(SchedulerTiming.take_steps)
        finally:
            await scheduler(SchedulerTiming.force_drafts, None)
        wanted = (shape.running, shape.running * shape.drafts_each)
        timed = [(running, context, drafts, seconds) for running, context, drafts, seconds in found]
        return [step for step in timed if (step[0], step[2]) == wanted][:steps]

    async def prefill(self, shape: PrefillShape) -> float:
        """Return the seconds until all sequences of this shape have their first token."""
        started = time.perf_counter()
        await requests.generate_alike(self.engine.llm, shape.sequences, shape.length, 1, {})
        return time.perf_counter() - started

    def unspeculated(self) -> unspeculated_steps.Unspeculated:
        """Return the decode steps of an engine without speculation, as measured before this one started."""
        return self._unspeculated

    # --- carrying

    async def kv_bandwidth(self) -> tuple[float, str]:
        """Return the bytes a second that one rank sends one way (PAT 4.3, B_net^uni), for the longest context.

        Orders to the workers are in it, as in a move. Where it cannot be measured: 0, and why not.
        """
        workers = self.engine.workers
        layout = (await workers(WorkerCalls.rhyme_kv_layout))[0]
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
                for order in (WorkerCalls.rhyme_export_kv, WorkerCalls.rhyme_import_kv):
                    said = await workers(order, blocks, buffer.to_plain(), 0)
                    if refused := next(filter(None, said), ""):
                        return 0.0, refused
                seconds.append(time.perf_counter() - began)
            finally:
                store.remove(buffer)
        return count * size * await self.kv_bytes_per_token() / statistics.median(seconds[1:]), ""

    async def weight_load(self) -> tuple[float, str]:
        """Return the seconds until this engine runs a weight version of its node's memory; or 0 and why not."""
        store: SegmentStore | None = None
        try:
            buckets, tensors = await asyncio.to_thread(self._checkpoint)
            store = SegmentStore(buckets)
            segment = await asyncio.to_thread(store.store, self.engine.weight_version, _packed(buckets, tensors))
            seconds = [await self.engine.load_weights(segment) for _ in range(1 + REPEATS)]
        except (OSError, ValueError, WeightSpaceError) as error:
            return 0.0, first_line(error)
        finally:
            if store is not None:
                store.close()
        return statistics.median(seconds[1:]), ""

    def _checkpoint(self) -> tuple[tuple[Bucket, ...], dict[str, torch.Tensor]]:
        """Return the model's own weights, in the engine's number format, and the buckets to publish them in."""
        from transformers import AutoModelForCausalLM

        config = self.engine.llm.vllm_config.model_config
        model = AutoModelForCausalLM.from_pretrained(
            config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code
        )
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        described = [
            Parameter(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.numel() * t.element_size())
            for name, t in tensors.items()
        ]
        # A bucket for each parameter, so that no more than one is packed at a time.
        return plan_buckets(described, 1, 1), tensors

    # --- the profile

    async def kept_profile(self) -> tuple[str, str]:
        """Return the file on this node in which a profile of this engine is kept, and its text ("": nothing yet).

        Raises ProfileError when it cannot be read.
        """
        path = await self._profile_path()
        return str(path), profiles.read_text(path) if path.exists() else ""

    async def keep_profile(self, text: str) -> None:
        """Keep a profile for later runs on this node."""
        path = await self._profile_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        profiles.write(profiles.parse(text, "the profile"), path)

    async def install_profile(self, text: str) -> str:
        """Keep it for who asks (`step_times`), and plan drafts by it if this run plans any; return "" or why not."""
        self._step_times = text
        if not self.engine.rhyme.drafts_planned:
            return ""
        return await self.engine.scheduler(SchedulerDrafting.install_profile, text)

    def step_times(self) -> str:
        """Return the text of the profile this engine was given, "" before."""
        return self._step_times

    async def _profile_path(self) -> Path:
        return profiles.folder() / profiles.file_name(await self.subject(), self.engine.rhyme.drafting.model_runner)


def _packed(buckets: tuple[Bucket, ...], tensors: dict[str, torch.Tensor]) -> Iterator[np.ndarray]:
    for bucket in buckets:
        (entry,) = bucket.entries
        packed = np.zeros(bucket.nbytes, dtype=np.uint8)
        raw = tensors[entry.parameter.name].contiguous().view(-1).view(torch.uint8).numpy()
        packed[: raw.size] = raw
        yield packed
