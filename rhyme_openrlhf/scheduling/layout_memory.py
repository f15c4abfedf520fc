"""What the layouts of a run take of its devices' memory, decided before anything starts. Pure.

The weights of every layout are there all the time. Their KV caches are too (`both_awake`), if they fit beside each
other: then a switch is nothing but moves. If they do not, only the layout that runs has its KV cache, and a switch
takes the memory from one and gives it to the other.

Invariants: what is planned fits into what is offered, or is refused in one sentence with the flag that would make it
fit; with `both_awake` the sum counts, else the largest; a tail engine holds as many tokens as an aligned one unless
told otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from rhyme_openrlhf.scheduling.layouts import LayoutError, LayoutPlan, Model
from rhyme_openrlhf.settings.tp_switch import AUTO, SMALLEST_KV_MB, TOGETHER, TURNS

MB = 1024**2
# What a process of an engine takes beside weights and KV cache, where weights lie in the machine's own memory: an actor
# with vLLM's frontend, an engine core, a worker (measured, docs/benchmarks.md).
PROCESS_MB = 600


@dataclass(frozen=True)
class Offer:
    """What engines may take: `free` bytes of each device; `said`: the same for a person, as the end of a sentence.

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
    """What each layout takes of each device."""

    shares: tuple[Share, ...]
    both_awake: bool

    @property
    def fixed(self) -> int:
        """Of each device, whichever layout runs."""
        return sum(share.weights + share.reserve for share in self.shares)

    @property
    def caches(self) -> int:
        """The KV caches that are there at once."""
        sizes = [share.kv_cache for share in self.shares]
        return sum(sizes) if self.both_awake else max(sizes)

    @property
    def total(self) -> int:
        """Of each device at most."""
        return self.fixed + self.caches


def plan_memory(plan: LayoutPlan, model: Model, offer: Offer) -> MemoryPlan:
    """What a plan takes of each device."""
    return MemoryPlan(
        tuple(
            Share(model.weight_bytes // size, kv_mb * MB, _reserve(size, plan.devices, offer))
            for size, kv_mb in zip(plan.sizes, plan.kv_sizes, strict=True)
        ),
        plan.both_awake,
    )


def with_caches(plan: LayoutPlan, model: Model, asked: Asked, offer: Offer) -> LayoutPlan:
    """The plan with the size of every KV cache, and whether they are there together. Raises LayoutError."""
    ways = {AUTO: (True, False), TOGETHER: (True,), TURNS: (False,)}[asked.caches]
    tried = [_sized(dataclasses.replace(plan, both_awake=way), model, asked, offer) for way in ways]
    for sized in tried:
        if plan_memory(sized, model, offer).total <= offer.free and _holds_the_longest(sized, model):
            return sized
    raise LayoutError(_refused(tried[-1], model, asked, offer))


def memory_sentence(plan: LayoutPlan, model: Model, offer: Offer) -> str:
    """A plan that fits, in one sentence."""
    turns = "" if plan.both_awake else "; only the layout that runs has its KV cache"
    return f"layouts: {_parts(plan, plan_memory(plan, model, offer))}, {offer.said}{turns}"


def _sized(plan: LayoutPlan, model: Model, asked: Asked, offer: Offer) -> LayoutPlan:
    """With as much KV cache as is asked for; where it is to be what is left, with that."""
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
    """Of one layout on each device."""
    if offer.reserve_mb is not None:
        return offer.reserve_mb * MB
    # Of an engine: its actor, its core, and a worker for each rank if there is more than one.
    return devices // size * (2 if size == 1 else 2 + size) * PROCESS_MB * MB // devices


def _mb(number: int) -> str:
    return f"{number / MB:,.0f} MB"
