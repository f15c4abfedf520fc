"""A real vLLM engine of the embedded model for benchmarks, and a scheduler whose drafting policy can be changed.

Also what an engine needs on this machine, with a GPU or without (not run on a GPU). Invariant: the policy is only
changed while nothing runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from rhyme_openrlhf import embedded, platform
from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.gain import GainMeter
from rhyme_openrlhf.engine.calls import WorkerCalls
from rhyme_openrlhf.engine.scheduler import EngineScheduler
from rhyme_openrlhf.engine.scheduler_parts.drafting import Drafting
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.engine import CpuSettings

TIMEOUT_S = 300
# vLLM's own limit is 128; the fixed lengths of the benchmark end below this.
MOST_DRAFTS = 48
# Share of a GPU's memory for all engines of a benchmark; CUDA contexts and other programs have the rest.
GPU_SHARE = 0.9


def engine_environment() -> dict[str, str]:
    """Return the environment variables of engines in one process; without a GPU one core computes, uncompiled."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    return quiet if platform.gpu_present() else quiet | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


def gpu_arguments(engines: int) -> dict[str, Any]:
    """Return what each of `engines` engines takes of a GPU, and the number format of a run; nothing without a GPU."""
    return {"gpu_memory_utilization": GPU_SHARE / engines, "dtype": "bfloat16"} if platform.gpu_present() else {}


def engine_arguments(arguments: dict[str, Any], settings: CpuSettings) -> dict[str, Any]:
    """Return vLLM's arguments for one engine on this machine."""
    if platform.gpu_present():
        return arguments | gpu_arguments(1)
    from rhyme_openrlhf.platform.cpu_arguments import cpu_engine_arguments

    return cpu_engine_arguments(arguments, settings)


class PolicyDrafting(Drafting):
    """Drafts by the policy that is chosen: a planner's, or a fixed length that bypasses window and confidence."""

    def prepare(self, lengths: list[int], windows: list[int], profile: str) -> None:
        """Make a drafter of each fixed length, and one for each largest window that plans by `profile`."""
        self._planned: dict[int, tuple[HistoryDrafter, GainMeter]] = {}
        for window in windows:
            source = HistoryDrafter(dataclasses.replace(self.histospec, window_max=window))
            self.use(source)
            self.install_profile(profile)
            self._planned[window] = (source, self.gain)
        self._fixed = {
            n: HistoryDrafter(
                dataclasses.replace(
                    self.histospec, window_start=n, window_step=0, window_max=n, extend_confidence=1, stop_confidence=0
                )
            )
            for n in lengths
        }
        self.choose(0, False)

    def choose(self, policy: int, planned: bool) -> None:
        """Draft `policy` tokens from now on; 0: nothing; or, `planned`, as the planner says that has this window."""
        self._off = policy == 0
        if planned:
            source, gain = self._planned[policy]
        else:
            # Without drafts, the samples are still known. A fixed length measures no gain.
            source, gain = self._fixed.get(policy, next(iter(self._fixed.values()))), GainMeter(0)
        self.use(source)
        self.gain = gain

    def install_everywhere(self, prompt_key: str, path: str) -> str:
        """`install_history` in every drafter."""
        for drafter in (*(drafter for drafter, _ in self._planned.values()), *self._fixed.values()):
            drafter.install(prompt_key, np.memmap(Path(path), dtype=np.uint8, mode="r"))
        return ""

    def is_timed(self) -> bool:
        """Return whether steps are timed: only a planner needs step times; a fixed length does not pay for them."""
        return self.source.planner is not None

    def _asked(self, draft: Callable[..., Any], decoding: list[str], context: int) -> Any:
        if self._off:
            self.source.leave_out()
            return None
        return super()._asked(draft, decoding, context)


class PolicyScheduler(EngineScheduler):
    """The run's own with that drafting."""

    drafting_part = PolicyDrafting

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        policy: Any = self.drafting
        self.calls |= {
            "prepare": policy.prepare, "use": policy.choose, "install_everywhere": policy.install_everywhere,
        }  # fmt: skip


class DynamicScheduler(EngineScheduler):
    """Verifies what vLLM proposes as the budget says, or as vLLM's own dynamic speculation by batch size says."""

    # vLLM's constructor may ask for it already.
    _own = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own_tokens = 0
        self._unpadded = self.dynamic_sd_lookup
        self._ours = self.parts
        self.calls |= {"use": self.use, "read_counters": self.read_counters}

    def use(self, table: list[list[int]] | None) -> None:
        """vLLM's own way from now on, by this `num_speculative_tokens_per_batch_size`; None: the budget, and n-grams
        looked up as in a run."""
        self._own = table is not None
        self.core.workers(WorkerCalls.rhyme_look_up_serially, not self._own)
        # An interval without drafts may have been under way.
        assert self.drafting is not None
        self.drafting._ticket = self.drafting._scheduled = None
        self.parts = [] if self._own else self._ours
        self.dynamic_sd_lookup = self._unpadded
        if table is not None:
            self.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
                table, self.scheduler_config.max_num_seqs, self.num_spec_tokens
            )

    def read_counters(self) -> dict[str, int | float]:
        """Return the run's own counters, with the tokens of vLLM's own way."""
        counters = self.meter.read_counters()
        counters["response_tokens"] += self._own_tokens
        return counters

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own way counts its tokens, which its speed is made of, and nothing else of ours."""
        if not self._own:
            return super().update_from_output(scheduler_output, model_runner_output)
        outputs = Scheduler.update_from_output(self, scheduler_output, model_runner_output)
        self._own_tokens += sum(len(one.new_token_ids) for client in outputs.values() for one in client.outputs)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        if self._own:
            Scheduler.update_draft_token_ids(self, draft_token_ids)
        else:
            super().update_draft_token_ids(draft_token_ids)


class RunningEngine:
    """One engine; its event loop runs in a thread of its own."""

    def __init__(self, settings: RhymeSettings, scheduler: str) -> None:
        """`scheduler`: the module and class that vLLM's engine process imports."""
        os.environ.update(
            engine_environment()
            | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            # The engine's process is a new one.
            | {"PYTHONPATH": os.pathsep.join(sys.path)}
        )
        self._number = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.llm = self.call(self._start(settings, scheduler))

    async def _start(self, settings: RhymeSettings, scheduler: str) -> Any:
        import vllm

        from rhyme_openrlhf.engine.arguments import WORKER_EXTENSION, speculation_arguments

        plugins = speculation_arguments(settings)
        if settings.drafts_from_history:
            plugins["speculative_config"]["num_speculative_tokens"] = MOST_DRAFTS
        arguments = {
            "model": str(embedded.MODEL),
            "max_model_len": 640,
            "max_num_seqs": 64,
            "enforce_eager": True,
            "worker_extension_cls": WORKER_EXTENSION,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 1,
            **plugins,
            "scheduler_cls": scheduler,
        }
        return vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**engine_arguments(arguments, settings.cpu)))

    def call(self, coroutine: Any) -> Any:
        """Wait for it. Raises TimeoutError after TIMEOUT_S."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def begin(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        """Let it run beside."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def scheduler(self, method: str, *arguments: Any) -> Any:
        """Call the engine's scheduler."""
        return self.call(self.ask(method, *arguments))

    async def ask(self, method: str, *arguments: Any) -> Any:
        """`scheduler`, within the event loop."""
        from rhyme_openrlhf.engine.patches.core_channel import call_scheduler

        return await call_scheduler(self.llm, method, *arguments)

    async def one(self, prompt: list[int], parameters: Any) -> Any:
        """Return the output of one request."""
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        generator = self.llm.generate({"prompt_token_ids": prompt}, parameters, request_id=f"benchmark-{self._number}")
        return [output async for output in generator][-1].outputs[0]

    def generate(self, prompts: list[list[int]], parameters: list[Any]) -> list[Any]:
        """Return the output of each prompt, in order; all run at once."""

        async def every() -> list[Any]:
            return list(await asyncio.gather(*map(self.one, prompts, parameters)))

        return list(self.call(every()))

    def stop(self) -> None:
        """End the engine's process."""

        async def shut_down() -> None:
            self.llm.shutdown()

        self.call(shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
