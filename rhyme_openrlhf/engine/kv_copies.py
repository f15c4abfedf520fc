"""Copies that a worker makes for a move: KV blocks out of its rank's caches and in again, and a generator's state.

All is done between two steps. Invariants: only whole blocks are copied, along the block dimension; a cache of another
layout than [blocks, heads, block size, keys and values] is not touched. Checked against vLLM 0.29.0 on CPU. On a GPU,
where nothing of it has run yet, blocks go through pinned memory (kv/pinned_copies.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from rhyme_openrlhf.engine.patches.resumed_requests import generator_bytes
from rhyme_openrlhf.kv.buffer import HeadShare, KvBuffer, KvLayout, head_share
from rhyme_openrlhf.kv.pinned_copies import pinned_copies
from rhyme_openrlhf.platform import gpu_present


def export_blocks(
    caches: Sequence[torch.Tensor], blocks: Sequence[int], buffer: KvBuffer, first: int, share: HeadShare
) -> None:
    """Copy blocks to rows `first`... of the buffer; `caches` are a rank's layers, [blocks, heads, block size, width].

    `share`: the rank's heads. Raises OSError if the buffer is gone or has no room.
    """
    if not share.writes or not blocks:
        return
    end = first + len(blocks)
    buffer.allocate(first, end)
    rows = buffer.open()
    if gpu_present():
        for start, piece in pinned_copies().to_host(caches, blocks):
            at = first + start
            rows[:, at : at + piece.shape[1], share.first : share.end] = piece
        return
    chosen = torch.tensor(blocks)
    for layer, cache in enumerate(caches):
        rows[layer, first:end, share.first : share.end] = cache.index_select(0, chosen)


def import_blocks(
    caches: Sequence[torch.Tensor], blocks: Sequence[int], buffer: KvBuffer, first: int, share: HeadShare
) -> None:
    """Copy rows `first`... of the buffer into blocks. Raises OSError if the buffer is gone."""
    rows = buffer.open()[:, first : first + len(blocks), share.first : share.end]
    if gpu_present():
        pinned_copies().to_device(rows, caches, blocks)
        return
    chosen = torch.tensor(blocks)
    for layer, cache in enumerate(caches):
        cache.index_copy_(0, chosen, rows[layer])


class KvCopies:
    """The copies of one rank."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner."""
        self._runner = runner

    def layout(self) -> dict[str, Any] | str:
        """Return the layout of the KV cache (fields of KvLayout), or one sentence why its blocks cannot be moved."""
        caches = self._runner.kv_caches
        config = self._runner.vllm_config
        block_size = config.cache_config.block_size
        heads = config.model_config.get_total_num_kv_heads()
        share = head_share(0, get_tensor_model_parallel_world_size(), heads)
        shape = (share.end - share.first, block_size)
        if any(cache.ndim != 4 or tuple(cache.shape[1:3]) != shape for cache in caches):
            shapes = sorted({tuple(cache.shape) for cache in caches})
            return f"KV blocks of shape {shapes} cannot be moved: [blocks, heads, block size, width] can"
        dtype = str(caches[0].dtype).removeprefix("torch.")
        return asdict(KvLayout(len(caches), heads, block_size, caches[0].shape[3], dtype))

    def export(self, blocks: list[int], buffer: dict[str, Any], first: int) -> str:
        """Copy blocks of this rank to rows `first`... of the buffer; returns "" or why not."""
        return self._copy(export_blocks, blocks, buffer, first)

    def load(self, blocks: list[int], buffer: dict[str, Any], first: int) -> str:
        """Copy rows `first`... of the buffer to blocks of this rank; returns "" or why not."""
        return self._copy(import_blocks, blocks, buffer, first)

    def _copy(self, copy: Any, blocks: list[int], plain: dict[str, Any], first: int) -> str:
        buffer, caches = KvBuffer.from_plain(plain), self._runner.kv_caches
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        share = head_share(rank, ranks, buffer.layout.heads)
        try:
            copy(caches, blocks, buffer, first, share)
        except (OSError, torch.OutOfMemoryError) as error:
            # Raised in a worker it would end the engine.
            return f"KV blocks were not copied: {error}"
        return ""

    def generator_state(self, request_id: str) -> bytes | None:
        """Return the state of a request's own random number generator; None if it has none.

        It has none in vLLM's second runner, whose random numbers are a function of the seed and the position.
        """
        state = getattr(self._runner, "requests", {}).get(request_id)
        return None if state is None or state.generator is None else generator_bytes(state.generator)
