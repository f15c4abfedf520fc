"""Decode steps of an engine without speculation, measured before a run's first engine starts, in that engine's process.

On a GPU vLLM 0.29.0 runs an engine without drafts otherwise: second model runner, asynchronous scheduling, FULL CUDA
graphs. "Gain now" is against such an engine (drafting/gain.py), which no engine can become once it has started.
Measuring takes one engine start more. The steps are kept in the profile, so only the first run of a model pays.

Invariants:
- Without a GPU nothing is measured, because vLLM runs both engines alike there.
- A failure costs the steps and never the run.
- The other engine's processes have ended when `measured` returns, and with them their hold on the GPUs' memory.

Nothing here has run on a GPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import psutil
from vllm.transformers_utils.config import get_config
from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine.calls import WorkerCalls
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import UNSPECULATED_QUICKLY, Plan, measure
from rhyme_openrlhf.latency.profile import ProfileError, StepPoint, Subject
from rhyme_openrlhf.platform import gpu_present, nvidia
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.latency import AUTO
from rhyme_openrlhf.telemetry.run_directory import versions

# A burst of decode steps.
CALL_SECONDS = 60.0
# Ranks that are Ray's actors end with their job's driver, the engine core.
END_SECONDS = 60.0
LOOK_SECONDS = 0.1
# What a start or a call of an engine raises.
_FAILURES = (RuntimeError, ValueError, OSError, EngineDeadError)


class Unspeculated(NamedTuple):
    """The decode steps, none where they were not measured; `problem` says why a measurement failed."""

    steps: tuple[StepPoint, ...] = ()
    problem: str = ""


def are_wanted(rhyme: RhymeSettings, index: int, arguments: Mapping[str, Any]) -> bool:
    """Return whether engine `index`, with these arguments of vLLM's, is to measure them before it starts."""
    gain_is_measured = rhyme.drafts_planned and rhyme.drafting.probe_share > 0
    measures_itself = rhyme.latency.profile == AUTO and not rhyme.emulate.profile
    if index or not gain_is_measured or not measures_itself or not gpu_present():
        return False
    subject = Subject(
        profiles.model_name(get_config(arguments["model"], trust_remote_code=True), rhyme.drafting),
        profiles.hardware_name(tuple(gpu.name for gpu in nvidia.read().gpus)),
        arguments["dtype"],
        arguments["tensor_parallel_size"],
    )
    try:
        kept = profiles.folder() / profiles.file_name(subject, rhyme.drafting.model_runner)
        return not profiles.read(kept).unspeculated
    except ProfileError:
        return True


async def measured(measuring: Any, start: Callable[[], Awaitable[None]]) -> Unspeculated:
    """Return the steps of an engine that does not speculate once `start` is done, and end its vLLM.

    `measuring`: the part of its actor that measures (measuring.py). An engine over several nodes is not measured.
    """
    ranks: list[tuple[str, int]] = []
    try:
        await start()
        ranks = await measuring.engine.workers(WorkerCalls.rhyme_process)
        if len({node for node, _ in ranks}) > 1:
            return Unspeculated(problem="its ranks are on several nodes")
        waiting: Any = _Waiting(measuring)
        plan = await asyncio.to_thread(Plan.of, waiting, versions(), UNSPECULATED_QUICKLY)
        return Unspeculated((await asyncio.to_thread(measure, plan, waiting)).steps)
    except _FAILURES as error:
        return Unspeculated(problem=(str(error).strip().splitlines() or [type(error).__name__])[-1])
    finally:
        if (llm := getattr(measuring.engine, "llm", None)) is not None:
            llm.shutdown()
            await _until_gone([process for _, process in ranks])


async def _until_gone(processes: Sequence[int]) -> None:
    """Wait until these processes of this node have ended; at most END_SECONDS."""
    until = time.monotonic() + END_SECONDS
    while any(map(psutil.pid_exists, processes)) and time.monotonic() < until:
        await asyncio.sleep(LOOK_SECONDS)


class _Waiting:
    """Blocking calls to the measuring of an engine of this process, for threads beside its event loop."""

    def __init__(self, measuring: Any) -> None:
        self._measuring = measuring
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, method: str) -> Any:
        return partial(self._wait, method)

    def _wait(self, method: str, *arguments: Any) -> Any:
        asked = asyncio.run_coroutine_threadsafe(getattr(self._measuring, method)(*arguments), self._loop)
        try:
            return asked.result(CALL_SECONDS)
        except TimeoutError:
            asked.cancel()
            raise RuntimeError(f"waited {CALL_SECONDS:g} s for an engine: {method.replace('_', ' ')}") from None
