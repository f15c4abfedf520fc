"""The layouts of a run: engines that cover all rollout devices, and engines of more devices each for the tail. Pure.

Both are started once, over the same devices. Engines of the aligned layout have the first numbers, those of the tail
layout the next ones. Invariants: a layout covers each device once; what does not fit is one sentence that names the
flag which would make it fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MB = 1024**2
# What a process of an engine takes beside weights and KV cache, where weights lie in the machine's own memory: an actor
# with vLLM's frontend, an engine core, a worker (measured, docs/benchmarks.md).
PROCESS_MB = 600


class LayoutError(ValueError):
    """Layouts that cannot be; the message says why."""


@dataclass(frozen=True)
class Model:
    """As much of a model as layouts need. `weight_bytes`: of all parameters."""

    heads: int
    kv_heads: int
    weight_bytes: int


@dataclass(frozen=True)
class LayoutPlan:
    """`engines` of `size` devices each, then `tail_engines` of `tail_size` each, on the same devices.

    `tail_kv_mb`: KV cache of each rank of a tail engine.
    """

    engines: int
    size: int
    tail_engines: int
    tail_size: int
    tail_kv_mb: int = 0

    @property
    def devices(self) -> int:
        """Of each layout."""
        return self.engines * self.size

    def aligned(self, numbers: Sequence[int]) -> list[int]:
        """Those of these engines that prompts go to."""
        return [number for number in numbers if number < self.engines]

    def layouts(self) -> dict[int, int]:
        """The layout of each engine, by number: 0 aligned, 1 tail."""
        return {number: int(number >= self.engines) for number in range(self.engines + self.tail_engines)}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each device, by what they are for. `processes`: what the engines' processes take beside the others."""

    weights: int
    kv_cache: int
    tail_weights: int
    tail_kv_cache: int
    processes: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.kv_cache + self.tail_weights + self.tail_kv_cache + self.processes


def plan_layouts(
    engines: int, size: int, tail_size: int, model: Model, kv_mb: int = 0, tail_kv_mb: int = 0
) -> LayoutPlan:
    """The layouts of `engines` engines of `size` devices with a tail of `tail_size` each. Raises LayoutError.

    `kv_mb`: KV cache of each rank of the engines; `tail_kv_mb`: of the tail's, 0 for as many tokens of an engine. Where
    heads are replicated a rank holds more of each token than its share.
    """
    devices = engines * size
    if devices < 2:
        raise LayoutError("--tp_switch.enable needs two devices: --vllm.num_engines 1 has one")
    if tail_size <= size:
        raise LayoutError(
            f"--tp_switch.size {tail_size} is no more tensor parallelism than --vllm.tensor_parallel_size {size}"
        )
    if devices % tail_size:
        raise LayoutError(
            f"--tp_switch.size {tail_size} does not divide the {devices} devices of {engines} engines "
            f"(--vllm.num_engines, --vllm.tensor_parallel_size)"
        )
    if model.heads % tail_size:
        fits = ", ".join(str(n) for n in range(2, model.heads + 1) if model.heads % n == 0) or "none"
        raise LayoutError(
            f"--tp_switch.size {tail_size} does not divide the model's {model.heads} attention heads; possible: {fits}"
        )
    if model.kv_heads % tail_size and tail_size % model.kv_heads:
        raise LayoutError(
            f"--tp_switch.size {tail_size} fits the model's {model.kv_heads} key-value heads in no way: one must "
            "divide the other"
        )
    share = math.ceil(kv_mb * _on_rank(model, tail_size) / _on_rank(model, size))
    return LayoutPlan(engines, size, devices // tail_size, tail_size, tail_kv_mb or share)


def plan_memory(plan: LayoutPlan, model: Model, kv_mb: int) -> MemoryPlan:
    """What both layouts take of each device, whichever generates."""
    weights = model.weight_bytes
    processes = plan.engines * _processes(plan.size) + plan.tail_engines * _processes(plan.tail_size)
    return MemoryPlan(
        weights // plan.size,
        kv_mb * MB,
        weights // plan.tail_size,
        plan.tail_kv_mb * MB,
        processes * PROCESS_MB * MB // plan.devices,
    )


def check_memory(memory: MemoryPlan, plan: LayoutPlan, free: int, kv_flag: str) -> str:
    """The plan in one sentence. `free`: bytes of all devices together. Raises LayoutError if it does not fit."""
    needed = memory.total * plan.devices
    parts = (
        f"{plan.engines} engines of tensor parallelism {plan.size} with {_mb(memory.weights)} of weights and "
        f"{_mb(memory.kv_cache)} of KV cache on each device, {plan.tail_engines} of {plan.tail_size} with "
        f"{_mb(memory.tail_weights)} and {_mb(memory.tail_kv_cache)}, and {_mb(memory.processes)} on each for their "
        f"processes: {_mb(needed)} on {plan.devices} devices"
    )
    if needed <= free:
        return f"layouts: {parts}, {_mb(free)} are free"
    over = -(-(needed - free) // plan.devices)
    caches = memory.kv_cache + memory.tail_kv_cache
    if over < caches:
        lower = f"lower {kv_flag} and --tp_switch.kv_cache_mb by {_mb(over)} together"
    else:
        lower = "leave --tp_switch.enable out: weights and processes alone do not fit twice"
    raise LayoutError(f"the layouts of --tp_switch.enable do not fit: {parts}, but {_mb(free)} are free; {lower}")


def _processes(size: int) -> int:
    """Of an engine: its actor, its core, and a worker for each rank if there is more than one."""
    return 2 if size == 1 else 2 + size


def _on_rank(model: Model, size: int) -> int:
    return max(model.kv_heads // size, 1)


def _mb(number: int) -> str:
    return f"{number / MB:,.0f} MB"
