"""The layouts of a run: engines that cover all rollout devices, and engines of more devices each for the tail. Pure.

All are started once, over the same devices. Engines of the aligned layout have the first numbers, those of the tail
layouts the next ones, smaller sizes first. Invariants: a layout covers each device once; what cannot be is one sentence
that names the flag. What they take of the memory is `layout_memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNED = 0


class LayoutError(ValueError):
    """Layouts that cannot be; the message says why."""


@dataclass(frozen=True)
class Model:
    """As much of a model as layouts need. `weight_bytes`: of all parameters. `longest_bytes`: of the KV cache of the
    longest sample, all heads; 0 if nobody asks.
    """

    heads: int
    kv_heads: int
    weight_bytes: int
    longest_bytes: int = 0

    def kv_share(self, size: int) -> float:
        """The part of each token's KV cache that a rank of such an engine holds: replicated heads are whole."""
        return max(self.kv_heads // size, 1) / self.kv_heads


@dataclass(frozen=True)
class Tail:
    """`engines` of `size` devices each. `kv_mb`: KV cache of each rank."""

    engines: int
    size: int
    kv_mb: int = 0


@dataclass(frozen=True)
class LayoutPlan:
    """`engines` of `size` devices each, and on the same devices those of the tail layouts, by size.

    `kv_mb`: KV cache of each rank of the aligned engines. `both_awake`: the devices hold the KV caches of all layouts;
    else of the one that runs, and the others' sleep. `device_shares`: with GPUs, the part of a device's memory that a
    rank of each layout takes in all; () without.
    """

    engines: int
    size: int
    tails: tuple[Tail, ...]
    kv_mb: int = 0
    both_awake: bool = True
    device_shares: tuple[float, ...] = ()

    @property
    def devices(self) -> int:
        """Of each layout."""
        return self.engines * self.size

    def aligned(self, numbers: Sequence[int]) -> list[int]:
        """Those of these engines that prompts go to."""
        return [number for number in numbers if number < self.engines]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of an engine, by layout; the aligned one is ALIGNED."""
        return (self.size, *(tail.size for tail in self.tails))

    @property
    def kv_sizes(self) -> tuple[int, ...]:
        """MB of KV cache of each rank, by layout."""
        return (self.kv_mb, *(tail.kv_mb for tail in self.tails))

    def numbers(self, layout: int) -> range:
        """The engines of a layout."""
        counts = [self.engines, *(tail.engines for tail in self.tails)]
        first = sum(counts[:layout])
        return range(first, first + counts[layout])

    def layouts(self) -> dict[int, int]:
        """The layout of each engine, by number."""
        return {number: layout for layout in range(len(self.sizes)) for number in self.numbers(layout)}


def plan_layouts(engines: int, size: int, tail_sizes: Sequence[int], model: Model) -> LayoutPlan:
    """The layouts of `engines` engines of `size` devices with tails of such sizes. Raises LayoutError."""
    devices = engines * size
    if devices < 2:
        raise LayoutError("--tp_switch.enable needs two devices: --vllm.num_engines 1 has one")
    for tail_size in tail_sizes:
        _check_size(engines, size, tail_size, model)
    return LayoutPlan(engines, size, tuple(Tail(devices // tail_size, tail_size) for tail_size in sorted(tail_sizes)))


def _check_size(engines: int, size: int, tail_size: int, model: Model) -> None:
    if tail_size <= size:
        raise LayoutError(
            f"--tp_switch.size {tail_size} is no more tensor parallelism than --vllm.tensor_parallel_size {size}"
        )
    if engines * size % tail_size:
        raise LayoutError(
            f"--tp_switch.size {tail_size} does not divide the {engines * size} devices of {engines} engines "
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


def check_nodes(nodes: Sequence[str], sizes: Sequence[int]) -> None:
    """Whether the ranks of each engine are on one node, which moves within a node need.

    `nodes`: of each device, in the order in which engines take them. Raises LayoutError.
    """
    for size in sizes:
        for first in range(0, len(nodes), size):
            over = set(nodes[first : first + size])
            if len(over) > 1:
                raise LayoutError(
                    f"--tp_switch.size {size}: the devices that Ray gave do not divide into engines of {size} on one "
                    f"node each ({', '.join(f'{nodes.count(node)} on one' for node in sorted(set(nodes)))}); a "
                    "size that divides the devices of every node can be"
                )
