"""Calls that checks make: responses to requests in token ids, and the engine's properties.

Invariants:
- A request goes the way a sample goes: weight version as cache salt, history by prompt key, final output only.
- A check installs history by hand instead of fetching it from a history worker, so it knows the drafts.
- Samples of a check differ from each other, also where the run is reproducible.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from rhyme_openrlhf.engine.actor_parts.part import Part
from rhyme_openrlhf.engine.calls import SchedulerDrafting
from rhyme_openrlhf.engine.messages import Answer, Request
from rhyme_openrlhf.engine.requests import ALL_TOKENS, SampleIdentity, Seeds, checked, current_sample
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.settings.config import RhymeSettings

# In fp32 vLLM takes Triton's attention, whose products are TF32 (10 bits) unless this variable says otherwise: greedy
# choices would differ by rounding alone, and `rhyme verify` demands equality. Checked against Triton 3.7.1.
EXACT_PRODUCTS = {"TRITON_F32_DEFAULT": "ieee"}


class Answers(Part):
    """The answers of one engine of `rhyme verify`."""

    async def before_start(
        self, arguments: dict[str, Any], start: Callable[[RhymeSettings, dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Have products in fp32 be exact."""
        if arguments["dtype"] == "float32":
            # In this process, from which all of vLLM's processes get their environment.
            os.environ.update(EXACT_PRODUCTS)

    async def has_started(self) -> None:
        """Seed no request."""
        self.engine.seeds = Seeds(0, reproducible=False)

    async def answer(self, requests: list[Request]) -> list[Answer]:
        """Return the answer to each request, in order; all run at once."""
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: Request) -> Answer:
        # gather() runs each coroutine in a task with its own copy of the context.
        current_sample.set(SampleIdentity(request.history, 0, 0) if request.history else None)
        parameters = checked(request.max_tokens, request.temperature, request.top_p)
        return Answer.of((await self.engine.generate(list(request.prompt), parameters)).outputs[0])

    async def next_token_log_probs(self, prompt: list[int]) -> np.ndarray:
        """Return the model's log-probability of each token of the vocabulary (float64[vocabulary]) after `prompt`."""
        (at,) = (await self.engine.generate(list(prompt), checked(1, logprobs=ALL_TOKENS))).outputs[0].logprobs
        table = np.full(max(at) + 1, -np.inf)
        for token, entry in at.items():
            table[token] = entry.logprob
        return table

    async def install(self, history: str, index: np.ndarray) -> str:
        """Let requests of `history` draft from `index`; return "" or one sentence that says why they cannot."""
        return await self.engine.histories.feed.hand_over(prompt_key(history), index)

    async def forget(self, history: str) -> None:
        """Drop an installed history."""
        await self.engine.scheduler(SchedulerDrafting.forget_history, prompt_key(history))

    async def counters(self) -> dict[str, int | float]:
        """Return everything the engine did since it started, as EngineCounters' fields."""
        return (await self.engine.totals()).to_dict()

    async def facts(self) -> dict[str, Any]:
        """Return what this engine is: number format, model runner, scheduling, and GPU memory after its start on a GPU.

        The GPU branch has not been run on a GPU by us yet.
        """
        import torch

        config = self.engine.llm.vllm_config
        found = {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "speculates": config.speculative_config is not None,
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
        }
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found |= {"gpu": torch.cuda.get_device_name(), "gpu_free_bytes": free, "gpu_total_bytes": total}
        return found

    async def stop(self) -> None:
        """End vLLM's own processes, which outlive an actor that is killed."""
        self.engine.llm.shutdown()
