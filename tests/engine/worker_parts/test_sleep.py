"""A KV cache that sleeps by itself: what is asked of vLLM's allocator on a GPU, and that vLLM still has what is asked.

No GPU was there: only the allocator is a stand-in. Without a GPU the real thing runs
(tests/moves/test_tensor_parallel_moves.py).
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.engine.worker_parts import sleep
from rhyme_openrlhf.engine.worker_parts.sleep import KV_TAG, SleepingWorker


def test_on_a_gpu_only_the_kv_cache_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import cumem

    told: list[Any] = []
    allocator = SimpleNamespace(
        discard=lambda tags: told.append(("discard", tags)), wake_up=lambda tags: told.append(("wake_up", tags))
    )
    monkeypatch.setattr(sleep, "gpu_present", lambda: True)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", staticmethod(lambda: allocator))
    monkeypatch.setattr(sleep.torch.cuda, "synchronize", lambda: told.append("synchronize"))
    worker = SleepingWorker()
    worker.rhyme_sleep_kv()
    worker.rhyme_wake_kv()
    assert told == [("discard", (KV_TAG,)), ("wake_up", [KV_TAG]), "synchronize"]


def test_vllm_has_what_is_asked_of_it() -> None:
    """Fails when vLLM changes what this was written from (0.29.0)."""
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.v1.worker import gpu_worker, utils

    assert list(inspect.signature(CuMemAllocator.discard).parameters) == ["self", "tags"]
    assert list(inspect.signature(CuMemAllocator.wake_up).parameters) == ["self", "tags"]
    # A discarded tag keeps no copy on the host, and is left alone if it sleeps already.
    assert "is_asleep" in inspect.getsource(CuMemAllocator.discard)
    worker = inspect.getsource(gpu_worker.Worker)
    assert f'tag="{KV_TAG}"' in worker and "enable_cumem_allocator" in worker
    # KV caches of given size are measured by nobody, but the device must have the engine's share free.
    assert "if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes" in worker
    assert "free_memory < requested_memory" in inspect.getsource(utils.request_memory)


def test_no_name_of_vllms_worker_is_taken() -> None:
    """vLLM refuses a worker extension that has one."""
    from vllm.v1.worker.gpu_worker import Worker

    assert not {name for name in vars(SleepingWorker) if name.startswith("rhyme")} & set(dir(Worker))
