"""A patch: one method on vLLM's EngineCore, so that an engine's owner can call its scheduler, and that its workers.

vLLM offers `call_utility(name, *args)` from the driver to methods of EngineCore, and no way to reach the scheduler.
Importing this module (the scheduler plug-in does, in the engine-core process) adds `EngineCore.rhyme_scheduler`.
What it calls is given a way to the workers, and may say whether the engine's loop may wait for calls.
Checked against vLLM 0.29.0 and 0.32.0 `v1/engine/core.py`; contract test: `tests/engine/patches/test_core_channel.py`.

Invariant: only methods named in the scheduler's `CALLABLE` can be called.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.core import EngineCore

METHOD = "rhyme_scheduler"


def _call_scheduler(self: EngineCore, method: str, arguments: list) -> Any:
    """Call `method(*arguments)` of this engine's scheduler; raises ValueError for a method it does not offer."""
    scheduler = self.scheduler
    if method not in getattr(scheduler, "CALLABLE", ()):
        raise ValueError(f"{type(scheduler).__name__} offers no method {method!r} to its engine's owner")
    if hasattr(scheduler, "call_workers"):
        # What schedules a request's blocks can so have them copied within one call, between the same two steps.
        scheduler.call_workers = self.model_executor.collective_rpc
    # Only an engine core in a process of its own has calls waiting.
    waiting = getattr(self, "input_queue", None)
    if hasattr(scheduler, "is_called") and waiting is not None:
        scheduler.is_called = lambda: not waiting.empty()
        # Its loop waits for a call, for as long as that takes, when it has nothing else to do; or only looks for one.
        scheduler.wait_for_calls = functools.partial(setattr, self, "process_input_queue_block")
    return getattr(scheduler, method)(*arguments)


setattr(EngineCore, METHOD, _call_scheduler)


async def call_scheduler(llm: Any, method: str, *arguments: Any) -> Any:
    """Call a scheduler method from the process that owns the engine (`llm` is a vLLM AsyncLLM)."""
    return await llm.engine_core.call_utility_async(METHOD, method, list(arguments))
