"""Some real engines of the embedded model, or another, in one process, whose samples can move, for benchmarks; no Ray.

Invariant: what their schedulers do is the product's own; only how long the parts that moves and reports add take is
added up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
import time
from collections import defaultdict
from typing import Any

from rhyme_openrlhf import embedded
from rhyme_openrlhf.platform import gpu_present, shims
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import AUTO

if not gpu_present():
    shims.install()

from engine_in_process import engine_environment, gpu_arguments

from rhyme_openrlhf.cli.preflight_runner import choose_runner
from rhyme_openrlhf.engine.actor import RhymeRolloutActor
from rhyme_openrlhf.engine.calls import EngineCalls
from rhyme_openrlhf.engine.factory import parts_of
from rhyme_openrlhf.engine.patches import core_channel
from rhyme_openrlhf.engine.scheduler import EngineScheduler, scheduler_class
from rhyme_openrlhf.engine.scheduler_parts.moves import Moves

TIMEOUT_S = 300
# Calls that hold the engine up between two steps.
ADDED = ("status", "import_all", "stop_sample", "hold_room", "export_full")


class TimedMoves(Moves):
    """Adds up the seconds of ADDED, and notes how long arrivals' first steps take."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._added: dict[str, list[float]] = defaultdict(list)
        self._went_on: dict[str, float] = {}
        self._first_step: float | None = None
        for name in ADDED:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                self._added[name].append(time.perf_counter() - began)

        return timed

    def _go_on(self, request: Any, arrival: Any) -> None:
        super()._go_on(request, arrival)
        self._went_on[request.request_id] = time.monotonic()

    def take_first_token(self, request_id: str) -> float | None:
        """Take the first token, like the base class."""
        at = super().take_first_token(request_id)
        if at is not None and request_id in self._went_on:
            self._first_step = at - self._went_on.pop(request_id)
        return at

    def take_first_step(self) -> float | None:
        """Seconds from an arrival's being taken up to its first token, of the last arrival that was asked about."""
        return self._first_step

    def take_added(self) -> dict[str, list[float]]:
        """Seconds of each call since the last question, by method."""
        taken, self._added = dict(self._added), defaultdict(list)
        return taken


def timed_scheduler(vllm_config: Any, **kwargs: Any) -> EngineScheduler:
    """Return the run's own scheduler with those moves, and calls that read the seconds."""
    kind = type("TimedScheduler", (scheduler_class(vllm_config),), {"moves_part": TimedMoves})
    scheduler: Any = kind(vllm_config=vllm_config, **kwargs)

    def late_seconds() -> float:
        """Return by how much steps took longer than this engine's pace, in all; 0 without one."""
        return 0.0 if scheduler.pacing is None else float(scheduler.pacing.late_seconds)

    moves = scheduler.moves
    scheduler.calls |= {
        "take_added": moves.take_added, "take_first_step": moves.take_first_step, "late_seconds": late_seconds,
    }  # fmt: skip
    return scheduler


class BenchmarkEngine(RhymeRolloutActor):
    """The run's engine with that scheduler."""

    def plugins(self) -> dict[str, Any]:
        return super().plugins() | {"scheduler_cls": "movable_engines.timed_scheduler"}


class LocalEngine:
    """One engine with an event loop of its own; `call` is a keeper's port."""

    def __init__(
        self,
        index: int,
        settings: RhymeSettings,
        length: int,
        seats: int,
        engines: int,
        model: str = str(embedded.MODEL),
        size: int = 1,
    ) -> None:
        """`engines`: how many engines of the benchmark share a GPU, where there is one."""
        os.environ.update(
            engine_environment()
            | {"RAY_ADDRESS": "not-asked", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
            | {"PYTHONPATH": os.pathsep.join(sys.path)}
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        moving = dataclasses.replace(settings, move=dataclasses.replace(settings.move, enable=True))
        if gpu_present() and moving.drafting.runner == AUTO:
            moving = moving.with_runner(choose_runner(moving, on_gpus=True)[0])
        self.raw: Any = BenchmarkEngine.__new__(BenchmarkEngine)
        arguments = dict(
            model=model, max_model_len=length, max_num_seqs=seats, block_size=32, enforce_eager=True,
            tensor_parallel_size=size, num_gpus=0, enable_prefix_caching=False, distributed_executor_backend="uni",
            logprobs_mode="processed_logprobs", max_logprobs=1, bundle_indices=None, run_seed=1, index=index,
            history_workers=[], parts=parts_of, rhyme=moving,
        )  # fmt: skip
        self.now(self._start(arguments | gpu_arguments(engines)))

    async def _start(self, arguments: dict[str, Any]) -> None:
        await self.raw.__init__(**arguments)

    def now(self, coroutine: Any) -> Any:
        """Wait for it. Raises TimeoutError after TIMEOUT_S."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    async def call(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the engine, like a port."""
        if method is EngineCalls.node_id:
            return "here"
        coroutine = getattr(self.raw, method.__name__)(*arguments)
        if not asyncio.iscoroutine(coroutine):
            return coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def scheduler(self, method: str, *arguments: Any) -> Any:
        """Call the engine's scheduler."""
        asked = core_channel.call_scheduler(self.raw.llm, method, *arguments)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))

    def stop(self) -> None:
        """End the engine's process."""

        async def shut_down() -> None:
            self.raw.llm.shutdown()

        self.now(shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
