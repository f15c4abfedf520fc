"""The engine that `rhyme profile` measures: a run's own rollout actor with another scheduler and filled contexts.

Invariants: every engine argument that does not serve measuring is the run's; requests sample at temperature 1, as runs
do, and stop only at the length asked for.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from rhyme_openrlhf.config import RhymeSettings
from rhyme_openrlhf.latency.grid import Limits, PrefillShape, StepShape
from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.rollout.engine import speculation_arguments
from rhyme_openrlhf.rollout.profiling_connector import FILLED
from rhyme_openrlhf.verify.engine_actor import VerifyEngine

SCHEDULER = "rhyme_openrlhf.rollout.profiling_scheduler.ProfilingScheduler"
CONNECTOR = "rhyme_openrlhf.rollout.profiling_connector"


class ProfileEngine(VerifyEngine):
    """One vLLM engine whose steps are timed."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self._random = random.Random(0)
        await super().__init__(*args, **kwargs)

    @staticmethod
    def plugins(rhyme: RhymeSettings) -> dict[str, Any]:
        """The run's, with the scheduler and the connector that measure."""
        connector = {
            "kv_connector": "ProfilingConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
        }
        return speculation_arguments(rhyme) | {"scheduler_cls": SCHEDULER, "kv_transfer_config": connector}

    async def limits(self) -> Limits:
        """What this engine can hold."""
        config = self.llm.vllm_config
        return Limits(
            running=config.scheduler_config.max_num_seqs,
            length=config.model_config.max_model_len,
            kv_cache_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            step_tokens=config.scheduler_config.max_num_scheduled_tokens
            or config.scheduler_config.max_num_batched_tokens,
        )

    async def padded_rows(self) -> tuple[int, ...]:
        """Token counts to which a step is padded: CUDA graph sizes (not run on a GPU yet), or the CPU's shapes."""
        if not gpu_present():
            from rhyme_openrlhf.platform.cpu_shapes import all_sizes

            return all_sizes()
        sizes = self.llm.vllm_config.compilation_config.cudagraph_capture_sizes or []
        return tuple(sorted(sizes))

    async def decode_steps(self, shape: StepShape, steps: int) -> list[tuple[int, int, int, float]]:
        """Run `steps` decode steps of this shape: (running, context, drafts, seconds) of those that had it."""
        await self.call_scheduler("force_drafts", shape.drafts_each)
        await self.call_scheduler("take_steps")
        # The first step of a request is its prefill (of one token), the last one has no next to be timed by.
        tokens = 2 + steps
        await self._run(shape.running, shape.context_each, tokens, filled=True)
        wanted = (shape.running, shape.running * shape.drafts_each)
        found = await self.call_scheduler("take_steps")
        return [tuple(step) for step in found if (step[0], step[2]) == wanted]

    async def prefill(self, shape: PrefillShape) -> float:
        """Seconds until all sequences of this shape have their first token."""
        await self.call_scheduler("force_drafts", 0)
        started = time.perf_counter()
        await self._run(shape.sequences, shape.length, 1, filled=False)
        return time.perf_counter() - started

    async def _run(self, sequences: int, length: int, tokens: int, filled: bool) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind
        from vllm.utils import random_uuid

        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            min_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={FILLED: True} if filled else None,
        )
        most = self.llm.vllm_config.model_config.get_vocab_size()

        async def one() -> None:
            # Random tokens, so that no prefix is found in a cache.
            prompt = TokensPrompt(prompt_token_ids=[self._random.randrange(most) for _ in range(length)])
            async for _ in self.llm.generate(prompt, parameters.clone(), request_id=random_uuid()):
                pass

        await asyncio.gather(*(one() for _ in range(sequences)))
