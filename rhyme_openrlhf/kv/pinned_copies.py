"""KV blocks between a GPU and the host's memory: pieces of all layers, through two pinned buffers, on a stream.

A copy to memory that is not pinned runs at a fraction of the link's rate. One copy a layer would wait for the device as
often as there are layers. Here one copy moves a piece of all layers, and the host empties (or fills) one pinned buffer
while the device fills (or empties) the other one. RLHFSpec, section 6.

Invariants: a piece is read on the host only when its copy is done. A pinned buffer is written again only when the copy
before is done. The copies come after the decode step before them, and the next decode step comes after the copies.
Not run on a GPU yet: the tests run it on CPU tensors with a stand-in for torch.cuda.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Large enough that the link is busy, small enough that a move holds little device memory.
PIECE_BYTES = 64 * 1024**2
BUFFERS = 2


class PinnedCopies:
    """The pinned buffers and the stream of one worker."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._buffers: dict[int, torch.Tensor] = {}

    def _pieces(self, caches: Sequence[torch.Tensor], count: int) -> Iterator[tuple[int, int, int]]:
        """Number, first and end of each piece of `count` blocks."""
        block = sum(cache[0].numel() * cache.element_size() for cache in caches)
        step = max(1, PIECE_BYTES // block)
        for number, start in enumerate(range(0, count, step)):
            yield number, start, min(start + step, count)

    def _buffer(self, number: int, caches: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
        """Return a pinned buffer as [layers, blocks, ...] of the caches."""
        shape = (len(caches), blocks, *caches[0].shape[1:])
        nbytes = caches[0].element_size() * torch.Size(shape).numel()
        key = number % BUFFERS
        if key not in self._buffers or self._buffers[key].numel() < nbytes:
            self._buffers[key] = pinned(nbytes)
        return self._buffers[key][:nbytes].view(caches[0].dtype).view(shape)

    def to_host(self, caches: Sequence[torch.Tensor], blocks: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield pieces of `blocks` as (place of the first one in `blocks`, [layers, blocks, ...]).

        A piece is overwritten once the one after the next is asked for.
        """
        device = caches[0].device
        chosen = torch.tensor(blocks, device=device)
        self._stream.wait_stream(torch.cuda.current_stream())
        coming: deque[tuple[int, torch.Tensor, Any]] = deque()
        for number, start, end in self._pieces(caches, len(blocks)):
            host = self._buffer(number, caches, end - start)
            with torch.cuda.stream(self._stream):
                piece = torch.empty(host.shape, dtype=host.dtype, device=device)
                for layer, cache in enumerate(caches):
                    torch.index_select(cache, 0, chosen[start:end], out=piece[layer])
                host.copy_(piece, non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
            coming.append((start, host, done))
            if len(coming) == BUFFERS:
                yield _arrived(coming.popleft())
        while coming:
            yield _arrived(coming.popleft())

    def to_device(self, rows: torch.Tensor, caches: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
        """Copy `rows`, [layers, blocks, ...] in the host's memory, into `blocks` of the caches."""
        device = caches[0].device
        chosen = torch.tensor(blocks, device=device)
        self._stream.wait_stream(torch.cuda.current_stream())
        going: dict[int, Any] = {}
        for number, start, end in self._pieces(caches, len(blocks)):
            if number % BUFFERS in going:
                going[number % BUFFERS].synchronize()
            host = self._buffer(number, caches, end - start)
            host.copy_(rows[:, start:end])
            with torch.cuda.stream(self._stream):
                piece = host.to(device, non_blocking=True)
                for layer, cache in enumerate(caches):
                    cache.index_copy_(0, chosen[start:end], piece[layer])
                going[number % BUFFERS] = torch.cuda.Event()
                going[number % BUFFERS].record(self._stream)
        # The next move's rows may take the buffers, and the next decode step reads the caches.
        for done in going.values():
            done.synchronize()


def _arrived(coming: tuple[int, torch.Tensor, Any]) -> tuple[int, torch.Tensor]:
    start, host, done = coming
    done.synchronize()
    return start, host


def pinned(nbytes: int) -> torch.Tensor:
    """Return new pinned memory, uint8[nbytes]."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@functools.cache
def pinned_copies() -> PinnedCopies:
    """Return the one of this process."""
    return PinnedCopies()
