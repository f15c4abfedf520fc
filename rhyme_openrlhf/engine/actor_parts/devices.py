"""KV buffers of an engine's node for moves, and devices that engines of two layouts share.

A move between two nodes has a buffer on each (kv/buffer.py). The destination asks the source's actor for rows, which go
from node to node as an object of Ray's store. The home that orders moves never holds the rows. Engines of two layouts
may share devices. Then one's timeline is the other's while it runs nothing, and each gives up its KV cache's memory on
order.

Invariants:
- A buffer made here belongs to this node and this process.
- Rows arrive whole, or the return value says why not.
- A KV cache sleeps only while no order about a sample is under way.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

import numpy as np

from rhyme_openrlhf.engine.actor_parts.part import Engine, Part
from rhyme_openrlhf.engine.actor_parts.timeline import ELSEWHERE
from rhyme_openrlhf.engine.calls import DeviceCalls, EnginePort, WorkerCalls
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.kv.buffer import KvBuffer, KvBufferStore, KvLayout, read_rows, write_rows


class Devices(Part):
    """KV buffers and shared devices of one engine whose samples can move.

    `is_tail()`: whether the engine belongs to a tail layout.
    """

    def __init__(self, engine: Engine, is_tail: Callable[[], None] = lambda: None) -> None:
        super().__init__(engine)
        self._is_tail = is_tail

    @functools.cached_property
    def _kv_buffers(self) -> KvBufferStore:
        return KvBufferStore()

    async def make_kv_buffer(self, layout: KvLayout, rows: int) -> KvBuffer:
        """Make a buffer on this node. Raises OSError."""
        return self._kv_buffers.make(layout, rows)

    async def remove_kv_buffer(self, buffer: KvBuffer) -> None:
        """Remove a buffer of this node; safe to do twice, and by another engine of the node."""
        self._kv_buffers.remove(buffer)

    async def read_kv_rows(self, buffer: KvBuffer, first: int, end: int) -> np.ndarray:
        """Blocks `first` to `end` of a buffer of this node, as `read_rows`. Raises OSError if it is gone."""
        return await asyncio.to_thread(read_rows, buffer, first, end)

    async def fetch_kv_rows(self, source: EnginePort, theirs: KvBuffer, ours: KvBuffer, first: int, end: int) -> str:
        """Copy blocks `first` to `end` of a buffer of another engine's node into one of this node; "" or why not."""
        try:
            rows = await source.call(DeviceCalls.read_kv_rows, theirs, first, end)
            await asyncio.to_thread(write_rows, ours, first, rows)
        except (EngineLost, OrderFailed, OSError) as error:
            return f"KV blocks did not come from the other node: {error}"
        return ""

    # --- two layouts on the same devices

    async def stand_by(self) -> None:
        """Count the time in which this engine runs nothing as another layout's, from now on."""
        self._is_tail()
        self.engine.rests = ELSEWHERE
        await self.lend_devices()

    async def lend_devices(self) -> None:
        """Leave the devices to another layout until this engine generates again."""
        if not self.engine.running:
            self.engine.timeline.enter(ELSEWHERE, time.time(), self.engine.weight_version)

    async def begin_switch(self) -> None:
        """Samples are on their way here from the other layout."""
        if not self.engine.running:
            self.engine.timeline.enter("switch", time.time(), self.engine.weight_version)

    async def end_switch(self) -> None:
        """End the wait for devices: they are here, or will not come."""
        if not self.engine.running:
            self.engine.timeline.enter(self.engine.rests, time.time(), self.engine.weight_version)

    async def sleep_kv(self) -> None:
        """Give the KV cache's memory to another layout. Samples that are here wait, and are computed again after it."""
        async with self.engine.orders.all():
            await self.engine.llm.pause_generation(mode="keep", clear_cache=True)
            await self.engine.workers(WorkerCalls.rhyme_sleep_kv)

    async def wake_kv(self) -> None:
        """Have it again, and go on."""
        async with self.engine.orders.all():
            await self.engine.workers(WorkerCalls.rhyme_wake_kv)
            await self.engine.llm.resume_generation()
