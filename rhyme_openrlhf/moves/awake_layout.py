"""Which layout of each node has its KV cache, where the devices hold that of one layout at a time.

Invariants: memory is taken from the engines of one layout before those of another get it, so each device holds one KV
cache; of a node one handing at a time; if it fails, the devices are whose they were, and if even that fails they are
partly nobody's until it is tried again. An engine that is gone has no memory and is not asked.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rhyme_openrlhf.engine.port import problem_of
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.scheduling.layouts import ALIGNED


class DeviceTurns:
    """Those of one home. `nodes`: of each node the engines of its layouts. `limit_s`: for an engine to give or take."""

    def __init__(self, keeper: SampleKeeper, nodes: Mapping[str, Mapping[int, Sequence[int]]], limit_s: float) -> None:
        self._keeper = keeper
        self._nodes = nodes
        self._limit_s = limit_s
        self._awake: dict[str, int] = defaultdict(lambda: ALIGNED)
        self._partly: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def awake(self, node: str) -> int:
        """The layout whose engines can generate."""
        return self._awake[node]

    async def hand(self, node: str, layout: int) -> str:
        """Give a node's devices to a layout; "" or why it has them not."""
        async with self._locks[node]:
            before = self._awake[node]
            if before == layout and node not in self._partly:
                return ""
            problem = await self._change(node, before, layout)
            if not problem:
                self._awake[node] = layout
                self._partly.discard(node)
                return ""
            if not (undone := await self._change(node, layout, before)):
                self._partly.discard(node)
                return problem
            self._partly.add(node)
            return f"{problem}; and then {undone}"

    def partly(self, node: str) -> bool:
        """Whether some engines of the layout that has the devices are without their memory."""
        return node in self._partly

    async def _change(self, node: str, source: int, target: int) -> str:
        problem = "" if source == target else await self._order(node, source, "sleep_kv")
        return problem or await self._order(node, target, "wake_kv")

    async def _order(self, node: str, layout: int, method: str) -> str:
        engines = [number for number in self._nodes[node].get(layout, ()) if self._keeper.engines[number].alive]
        asked = (problem_of(self._keeper.engines[number].port, number, self._limit_s, method) for number in engines)
        return next(filter(None, await asyncio.gather(*asked)), "")
