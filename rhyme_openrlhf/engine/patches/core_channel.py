"""A patch: one method on vLLM's EngineCore, by which an engine's owner calls its scheduler, and the scheduler workers.

vLLM offers `call_utility(name, *args)` from the driver to methods of EngineCore, and no way to reach the scheduler.
Importing this module (the scheduler plug-in does, in the engine-core process) adds `EngineCore.rhyme_scheduler`. Each
call gives the scheduler a way to the workers, and to the engine's loop, which waits for calls.
Checked against vLLM 0.29.0 and 0.32.0 `v1/engine/core.py`; contract test: `tests/engine/patches/test_core_channel.py`.

Invariant: only methods that a part of the scheduler offers by a protocol of engine/calls.py can be called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.v1.engine.core import EngineCore

METHOD = "rhyme_scheduler"
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class EngineCoreAccess:
    """The engine core around a scheduler, as of the last call from the engine's owner."""

    collective_rpc: Callable[..., list[Any]] | None = None
    is_called: Callable[[], bool] | None = None
    """Says whether another call waits; None: the engine's owner steps the engine, in its own process."""
    wait_for_calls: Callable[[bool], None] | None = None
    """Tells the engine core's loop whether it may wait for a call while it has no requests; None as `is_called`."""
    computes: Callable[[], bool] = bool
    """Says whether results of steps are still to come."""

    def workers(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **_: P.kwargs) -> list[R]:
        """Call a method of `WorkerCalls` on every rank, between two steps; returns the ranks' answers."""
        if self.collective_rpc is None:
            raise RuntimeError("the engine's owner must call the scheduler before the workers can be called")
        return self.collective_rpc(method.__name__, args=args)


def _call_scheduler(self: EngineCore, method: str, arguments: list) -> Any:
    """Call `method(*arguments)` of this engine's scheduler; raises ValueError for a method it does not offer."""
    scheduler: Any = self.scheduler
    if method not in getattr(scheduler, "calls", {}):
        raise ValueError(f"{type(scheduler).__name__} offers no method {method!r} to its engine's owner")
    # What schedules a request's blocks can so have them copied within one call, between the same two steps.
    scheduler.core.collective_rpc = self.model_executor.collective_rpc
    scheduler.core.computes = lambda: bool(self.batch_queue)
    # Only an engine core in a process of its own has calls waiting.
    waiting = getattr(self, "input_queue", None)
    if waiting is not None:
        scheduler.core.is_called = lambda: not waiting.empty()
        # Its loop waits for a call, for as long as that takes, when it has nothing else to do; or only looks for one.
        scheduler.core.wait_for_calls = functools.partial(setattr, self, "process_input_queue_block")
    return scheduler.calls[method](*arguments)


setattr(EngineCore, METHOD, _call_scheduler)


async def call_scheduler(llm: Any, method: str, *arguments: Any) -> Any:
    """Call a scheduler method from the process that owns the engine (`llm` is a vLLM AsyncLLM)."""
    return await llm.engine_core.call_utility_async(METHOD, method, list(arguments))
