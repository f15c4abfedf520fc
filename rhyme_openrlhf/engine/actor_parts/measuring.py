"""What an engine actor can do to have its decode steps measured: of a run that has no profile, or of `rhyme profile`.

Invariants: measuring is done while no sample runs, leaves no trace in the engine's counters, and ends with the
scheduler as it was; requests sample at temperature 1, as runs do, and stop only at the length asked for.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.utils import random_uuid

from rhyme_openrlhf.engine.request_keys import UNCOUNTED
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import Limits, PrefillShape, StepShape
from rhyme_openrlhf.latency.profile import Subject
from rhyme_openrlhf.settings.config import RhymeSettings


class StepMeasuring:
    """Mixed into an engine actor with `llm`, vLLM's AsyncLLM, its settings `rhyme`, and `call_scheduler`."""

    llm: Any
    rhyme: RhymeSettings
    call_scheduler: Any
    _step_times = ""

    def context_arguments(self) -> dict[str, Any]:
        """Return what requests of measured decode steps carry beside UNCOUNTED; nothing: contexts are computed."""
        return {}

    async def subject(self) -> Subject:
        """What a profile of this engine is of."""
        config = self.llm.vllm_config
        hardware = (await self.llm.collective_rpc("rhyme_hardware"))[0]
        return Subject(
            model=profiles.model_name(config.model_config.hf_config, self.rhyme.drafting),
            hardware=hardware,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        )

    async def limits(self) -> Limits:
        """What this engine can hold."""
        config = self.llm.vllm_config
        return Limits(
            running=config.scheduler_config.max_num_seqs,
            length=config.model_config.max_model_len,
            kv_cache_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            step_tokens=config.scheduler_config.max_num_scheduled_tokens
            or config.scheduler_config.max_num_batched_tokens,
            drafts_each=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
            verified_rows=await self.call_scheduler("row_limit") if config.speculative_config else None,
        )

    async def kv_bytes_per_token(self) -> int:
        """As in `latency/profile.py`."""
        config, subject = self.llm.vllm_config.model_config.hf_config, await self.subject()
        return profiles.kv_bytes_per_token(config, subject.dtype, subject.tensor_parallel_size)

    async def padded_rows(self) -> tuple[int, ...]:
        """Token counts to which a step is padded, ascending: as the worker has resolved them."""
        return tuple((await self.llm.collective_rpc("rhyme_padded_rows"))[0])

    async def decode_steps(self, shape: StepShape, steps: int) -> list[tuple[int, int, int, float]]:
        """Run `steps` decode steps of this shape: (running, context, drafts, seconds) of those that had it."""
        await self.call_scheduler("force_drafts", shape.drafts_each)
        try:
            await self.call_scheduler("take_steps")
            # The first step of a request is its prefill (of one token), the last one has no next to be timed by.
            tokens = 2 + steps
            filled = self.context_arguments()
            if not filled:
                # Contexts are computed: the first samples have to wait for the last ones', decoding meanwhile.
                computed = shape.running * shape.context_each
                tokens += 2 * -(-computed // (await self.limits()).step_tokens) * (1 + shape.drafts_each // 8)
            await self._run(shape.running, shape.context_each, tokens, filled)
            found = await self.call_scheduler("take_steps")
        finally:
            await self.call_scheduler("force_drafts", None)
        wanted = (shape.running, shape.running * shape.drafts_each)
        return [tuple(step) for step in found if (step[0], step[2]) == wanted][:steps]

    async def prefill(self, shape: PrefillShape) -> float:
        """Seconds until all sequences of this shape have their first token."""
        started = time.perf_counter()
        await self._run(shape.sequences, shape.length, 1, {})
        return time.perf_counter() - started

    async def _run(self, sequences: int, length: int, tokens: int, arguments: dict[str, Any]) -> None:
        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=tokens,
            min_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={UNCOUNTED: True} | arguments,
        )
        most = self.llm.vllm_config.model_config.get_vocab_size()
        # Different tokens, so that no prefix is found in a cache.
        chance = random.Random(time.perf_counter_ns())

        async def one() -> None:
            prompt = TokensPrompt(prompt_token_ids=[chance.randrange(most) for _ in range(length)])
            async for _ in self.llm.generate(prompt, parameters.clone(), request_id=random_uuid()):
                pass

        await asyncio.gather(*(one() for _ in range(sequences)))

    # --- the profile

    async def kept_profile(self) -> tuple[str, str]:
        """The file on this node in which a profile of this engine is kept, and what is in it ("": nothing yet).

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
        """Keep it for who asks (`step_times`), and plan drafts by it if this run plans any; returns "" or why not."""
        self._step_times = text
        return await self.call_scheduler("install_profile", text) if self.rhyme.drafts_planned else ""

    def step_times(self) -> str:
        """Return the text of the profile this engine was given, "" before."""
        return self._step_times

    async def _profile_path(self) -> Path:
        return profiles.folder() / profiles.file_name(await self.subject())
