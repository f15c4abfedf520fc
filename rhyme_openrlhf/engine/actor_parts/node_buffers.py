"""KV buffers of an engine's own node: what a move between two nodes needs beside one within a node.

The source's node and the destination's have a buffer each (kv/buffer.py). The destination asks the source's actor for
rows, which go from node to node as an object of Ray's store; the home through which moves are ordered never has them.

Invariants: a buffer that is made here is of this node and this process; rows arrive whole, or the answer says why not.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np

from rhyme_openrlhf.engine.port import EngineLost, EnginePort, OrderFailed
from rhyme_openrlhf.kv.buffer import KvBuffer, KvBufferStore, KvLayout, read_rows, write_rows


class NodeBuffers:
    """Mixed into an engine whose samples can move."""

    llm: Any

    @functools.cached_property
    def _kv_buffers(self) -> KvBufferStore:
        return KvBufferStore()

    async def make_kv_buffer(self, layout: KvLayout, rows: int) -> KvBuffer:
        """A new buffer on this node. Raises OSError."""
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
            rows = await source.call("read_kv_rows", theirs, first, end)
            await asyncio.to_thread(write_rows, ours, first, rows)
        except (EngineLost, OrderFailed, OSError) as error:
            return f"KV blocks did not come from the other node: {error}"
        return ""
