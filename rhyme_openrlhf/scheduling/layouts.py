"""The layouts of a run: engines that cover all rollout devices, and engines of more devices each for the tail.

All are started once, over the same devices, so what they take of the memory is decided before anything starts. The
weights of every layout are there all the time. Their KV caches are too (`both_awake`), if they fit beside each other:
then a switch is nothing but moves. If they do not, only the layout that runs has its KV cache, and a switch takes the
memory from one and gives it to the other. Engines of the aligned layout have the first numbers, those of the tail
layouts the next ones, smaller sizes first.

Invariants:
- A layout covers each device once.
- The plan fits into the memory offered; with `both_awake` the sum of the layouts counts, else the largest. A plan that
  does not fit is refused in one sentence with the flag that would make it fit.
- A tail engine holds as many tokens as an aligned one, unless a setting says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rhyme_openrlhf.settings.tp_switch import AUTO, SMALLEST_KV_MB, TOGETHER, TURNS

ALIGNED = 0


class LayoutError(ValueError):
    """Layouts that cannot be; the message says why."""


@dataclass(frozen=True)
class Model:
    """The figures of a model that layouts need. `weight_bytes`: of all parameters. `longest_bytes`: of the KV cache of
    the longest sample, all heads; 0 if it does not matter.
    """

    heads: int
    kv_heads: int
    weight_bytes: int
    longest_bytes: int = 0

    def kv_share(self, size: int) -> float:
        """Return the part of each token's KV cache that a rank of such an engine holds; replicated heads are whole."""
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
        """The devices of each layout."""
        return self.engines * self.size

    def aligned(self, numbers: Sequence[int]) -> list[int]:
        """Return those of these engines that prompts go to."""
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
        """Return the engines of a layout."""
        counts = [self.engines, *(tail.engines for tail in self.tails)]
        first = sum(counts[:layout])
        return range(first, first + counts[layout])

    def layouts(self) -> dict[int, int]:
        """Return the layout of each engine, by number."""
        return {number: layout for layout in range(len(self.sizes)) for number in self.numbers(layout)}


def plan_layouts(engines: int, size: int, tail_sizes: Sequence[int], model: Model) -> LayoutPlan:
    """Return the layouts of `engines` engines of `size` devices with tails of such sizes. Raises LayoutError."""
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
    """Return whether the ranks of each engine are on one node, which moves within a node need.

    `nodes`: of each device, in the order in which engines take them. Raises LayoutError.
    """
    for size in sizes:
        for first in range(0, len(nodes), size):
            over = set(nodes[first : first + size])
            if len(over) > 1:
                raise LayoutError(
                    f"--tp_switch.size {size}: Ray's devices do not divide into engines of {size} on one "
                    f"node each ({', '.join(f'{nodes.count(node)} on one' for node in sorted(set(nodes)))}); a "
                    "size that divides the devices of every node can be"
                )


MB = 1024**2
# Memory of an engine's process (actor with vLLM's frontend, engine core, worker) beside weights and KV cache, if
# weights are in main memory. Measured: docs/measurements/scheduling.md.
PROCESS_MB = 600


@dataclass(frozen=True)
class Offer:
    """The memory offered to engines: `free` bytes of each device; `said`: the same as the end of a sentence.

    `reserve_mb`: what each rank takes beside weights and KV cache where that is on the device (GPUs); None: as much as
    the engines' processes do (their memory is the devices').
    `kv_flag`: sets the KV cache of the aligned engines; `more`: what gives engines more memory, "" if nothing does.
    """

    free: int
    said: str
    kv_flag: str
    reserve_mb: int | None = None
    more: str = ""


@dataclass(frozen=True)
class Asked:
    """KV caches as they are asked for: MB of each rank of the aligned engines (0: what is left), of the tails' (0: as
    many tokens), and whether they are to be there together (AUTO: if they fit).
    """

    kv_mb: int
    tail_kv_mb: int = 0
    caches: str = AUTO


@dataclass(frozen=True)
class Share:
    """Bytes that one layout takes of each device. `reserve`: beside the other two."""

    weights: int
    kv_cache: int
    reserve: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that each layout takes of each device."""

    shares: tuple[Share, ...]
    both_awake: bool

    @property
    def fixed(self) -> int:
        """The memory of each device that every layout takes at any time."""
        return sum(share.weights + share.reserve for share in self.shares)

    @property
    def caches(self) -> int:
        """The KV caches that are there at once."""
        sizes = [share.kv_cache for share in self.shares]
        return sum(sizes) if self.both_awake else max(sizes)

    @property
    def total(self) -> int:
        """The most memory that is taken of each device."""
        return self.fixed + self.caches


def plan_memory(plan: LayoutPlan, model: Model, offer: Offer) -> MemoryPlan:
    """Return the memory that a plan takes of each device."""
    return MemoryPlan(
        tuple(
            Share(model.weight_bytes // size, kv_mb * MB, _reserve(size, plan.devices, offer))
            for size, kv_mb in zip(plan.sizes, plan.kv_sizes, strict=True)
        ),
        plan.both_awake,
    )


def with_caches(plan: LayoutPlan, model: Model, asked: Asked, offer: Offer) -> LayoutPlan:
    """Return the plan with the size of every KV cache, and whether they exist together. Raises LayoutError."""
    ways = {AUTO: (True, False), TOGETHER: (True,), TURNS: (False,)}[asked.caches]
    tried = [_sized(dataclasses.replace(plan, both_awake=way), model, asked, offer) for way in ways]
    for sized in tried:
        if plan_memory(sized, model, offer).total <= offer.free and _holds_the_longest(sized, model):
            return sized
    raise LayoutError(_refused(tried[-1], model, asked, offer))


def memory_sentence(plan: LayoutPlan, model: Model, offer: Offer) -> str:
    """Return a sentence on a plan that fits."""
    turns = "" if plan.both_awake else "; only the layout that runs has its KV cache"
    return f"layouts: {_parts(plan, plan_memory(plan, model, offer))}, {offer.said}{turns}"


def _sized(plan: LayoutPlan, model: Model, asked: Asked, offer: Offer) -> LayoutPlan:
    """Return the plan with the KV caches asked for; where none is given, with the memory that is left."""
    ratios = [model.kv_share(tail.size) / model.kv_share(plan.size) for tail in plan.tails]
    kv_mb = asked.kv_mb
    if not kv_mb:
        left = max(offer.free - plan_memory(plan, model, offer).fixed, 0) // MB
        if not plan.both_awake:
            kv_mb = left
        elif asked.tail_kv_mb:
            kv_mb = max(left - asked.tail_kv_mb * len(plan.tails), 0)
        else:
            # What is rounded up must fit too.
            kv_mb = max(int((left - len(plan.tails)) / (1 + sum(ratios))), 0)
    tails = tuple(
        dataclasses.replace(tail, kv_mb=asked.tail_kv_mb or max(math.ceil(kv_mb * ratio), SMALLEST_KV_MB))
        for tail, ratio in zip(plan.tails, ratios, strict=True)
    )
    return dataclasses.replace(plan, kv_mb=kv_mb, tails=tails)


def _holds_the_longest(plan: LayoutPlan, model: Model) -> bool:
    of = zip(plan.sizes, plan.kv_sizes, strict=True)
    return all(kv_mb * MB >= model.longest_bytes * model.kv_share(size) for size, kv_mb in of)


def _refused(plan: LayoutPlan, model: Model, asked: Asked, offer: Offer) -> str:
    memory = plan_memory(plan, model, offer)
    over = memory.total - offer.free
    if memory.fixed >= offer.free:
        way = "leave --tp_switch.enable out: weights and processes alone do not fit so often"
    elif over > 0:
        both = f"lower {offer.kv_flag} and --tp_switch.kv_cache_mb"
        each = f"{both} to at most {_mb(offer.free - memory.fixed)} each"
        way = f"{both} by {_mb(over)} together" if plan.both_awake else each
    else:
        way = f"no KV cache of such a size holds the longest sample ({_mb(model.longest_bytes)}): lower --data.max_len"
    if plan.both_awake and asked.caches == TOGETHER:
        way += ", or let --tp_switch.kv_caches be auto"
    if offer.more:
        way += f", or {offer.more}"
    return f"the layouts of --tp_switch.enable do not fit: {_parts(plan, memory)}, but {offer.said}; {way}"


def _parts(plan: LayoutPlan, memory: MemoryPlan) -> str:
    first, *rest = memory.shares
    reserve = _mb(sum(share.reserve for share in memory.shares))
    tails = ", ".join(
        f"{tail.engines} of {tail.size} with {_mb(share.weights)} and {_mb(share.kv_cache)}"
        for tail, share in zip(plan.tails, rest, strict=True)
    )
    return (
        f"{plan.engines} engines of tensor parallelism {plan.size} with {_mb(first.weights)} of weights and "
        f"{_mb(first.kv_cache)} of KV cache on each device, {tails}, and {reserve} on each for their processes: "
        f"{_mb(memory.total * plan.devices)} on {plan.devices} devices"
    )


def _reserve(size: int, devices: int, offer: Offer) -> int:
    """Return the reserve of one layout on each device."""
    if offer.reserve_mb is not None:
        return offer.reserve_mb * MB
    # Of an engine: its actor, its core, and a worker for each rank if there is more than one.
    return devices // size * (2 if size == 1 else 2 + size) * PROCESS_MB * MB // devices


def _mb(number: int) -> str:
    return f"{number / MB:,.0f} MB"
