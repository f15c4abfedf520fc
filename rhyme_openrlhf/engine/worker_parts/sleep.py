"""What a worker process of vLLM's does so that its KV cache gives up its memory, and has it again. Weights stay.

vLLM's own sleep puts weights to sleep too, at every level (v1/engine/core.py, v1/executor/abstract.py). Its allocator
can do one tag: KV caches have their own (v1/worker/gpu_worker.py, device_allocator/cumem.py), and keep their addresses,
which CUDA graphs have in them. Checked against vLLM 0.29.0's source; **never run on a GPU**. Without one the pages go
back to the machine (platform/cpu_memory.py).

Invariants: called while nothing is computed and no KV block is in use (the engine sees to that); both may be called
twice.
"""

from __future__ import annotations

from typing import Any

import torch

from rhyme_openrlhf.platform import gpu_present

# vLLM's.
KV_TAG = "kv_cache"


class SleepingWorker:
    """Mixed into the worker extension (`model_runner` is vLLM's)."""

    model_runner: Any

    def rhyme_sleep_kv(self) -> None:
        """Give the KV cache's memory up. Raises OSError, or what vLLM's allocator raises."""
        if gpu_present():
            # It waits for the device before it unmaps.
            _allocator().discard((KV_TAG,))
            return
        from rhyme_openrlhf.platform.cpu_memory import release

        release(self.model_runner.kv_caches)

    def rhyme_wake_kv(self) -> None:
        """Take it again; nothing is in it. Raises what vLLM's allocator raises if the device has not enough."""
        if gpu_present():
            _allocator().wake_up([KV_TAG])
            torch.cuda.synchronize()


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()
