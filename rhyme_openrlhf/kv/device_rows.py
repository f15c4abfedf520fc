"""KV blocks between two engines of a node that do not leave the devices: CUDA IPC, by torch's own sharing of tensors.

What one order copies out is a piece: the source's rank keeps its heads of those blocks in its device's memory, and a
file beside the sample's buffer says how to open them. The destination's ranks open the pieces that have their heads.

Invariants: a piece whose file is there is whole; its memory is held until its sample's move is over, or until the next
export after the buffer was removed, and no longer, whether anybody opened the piece or not. A device without memory for
a piece is an error of that copy, not of the engine.

Run on a CPU, where a piece is a second file beside the buffer. Not run on a GPU; there are two things beside torch's
documented sharing. The device a piece is opened on is the opener's own, as vLLM 0.29.0 does
(distributed/weight_transfer/ipc_engine.py), because each engine counts the devices it sees from 0. And torch counts one
opener when a tensor is shared, and keeps the memory until that opener is done, which never comes if nobody opens the
piece: so the source takes that count back at once, and holds the memory itself.
"""

from __future__ import annotations

import glob
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing import reductions

from rhyme_openrlhf.kv.buffer import HeadShare, KvBuffer

# Where torch's arguments for opening a CUDA tensor have the device it was made on (torch 2.x, rebuild_cuda_tensor).
_DEVICE_ARGUMENT = 6
# And where they name the count of those who have the tensor open.
_COUNT_ARGUMENTS = slice(11, 13)


class _Piece(NamedTuple):
    """What a piece's file says: the heads of all that are in it, and how to open it."""

    first_head: int
    end_head: int
    handle: bytes


class DeviceRows:
    """The pieces that one worker keeps, by the path of their buffer."""

    def __init__(self) -> None:
        self._kept: dict[str, list[torch.Tensor]] = {}

    def export(
        self, caches: Sequence[torch.Tensor], blocks: Sequence[int], buffer: KvBuffer, first: int, share: HeadShare
    ) -> None:
        """As `moving_worker.export_blocks`. Raises OSError, or torch.OutOfMemoryError."""
        for gone in [kept for kept in self._kept if not os.path.exists(kept)]:
            del self._kept[gone]
        if not share.writes or not blocks:
            return
        os.stat(buffer.path)
        chosen = torch.tensor(blocks, device=caches[0].device)
        piece = torch.stack([cache.index_select(0, chosen) for cache in caches])
        if piece.is_cuda:
            # Who opens it is on another stream.
            torch.cuda.synchronize(piece.device)
        self._kept.setdefault(buffer.path, []).append(piece)
        path = Path(f"{buffer.path}.{first}.{share.first}")
        file = f"{buffer.path}.kv-{first}-{share.first}"
        told = path.with_name(path.name + ".part")
        told.write_bytes(pickle.dumps(tuple(_Piece(share.first, share.end, _handle(piece, file)))))
        told.rename(path)

    @property
    def kept(self) -> set[str]:
        """The buffers that memory is held for."""
        return set(self._kept)

    def drop(self, path: str) -> None:
        """Keep nothing of a buffer any more."""
        self._kept.pop(path, None)


def import_pieces(
    caches: Sequence[torch.Tensor], blocks: Sequence[int], buffer: KvBuffer, first: int, share: HeadShare
) -> None:
    """As `moving_worker.import_blocks`. Raises OSError if not all of this rank's heads are there."""
    chosen, missing = torch.tensor(blocks, device=caches[0].device), set(range(share.first, share.end))
    for path in glob.glob(f"{glob.escape(buffer.path)}.{first}.*[0-9]"):
        piece = _Piece(*pickle.loads(Path(path).read_bytes()))
        here = range(max(piece.first_head, share.first), min(piece.end_head, share.end))
        if not here:
            continue
        missing.difference_update(here)
        theirs = slice(here.start - piece.first_head, here.stop - piece.first_head)
        ours = slice(here.start - share.first, here.stop - share.first)
        for cache, came in zip(caches, _open(piece.handle, caches[0].device), strict=True):
            cache[chosen, ours] = came[:, theirs].to(cache.device)
    if missing:
        raise OSError(f"heads {sorted(missing)} of the blocks from {first} on are not there")


def _handle(piece: torch.Tensor, file: str) -> bytes:
    """Return how to open a piece; without a GPU it is written to `file`."""
    if piece.is_cuda:
        arguments = reductions.reduce_tensor(piece)[1]
        torch.UntypedStorage._release_ipc_counter_cuda(*arguments[_COUNT_ARGUMENTS])
        return pickle.dumps(arguments)
    piece.view(torch.uint8).numpy().tofile(file)
    return pickle.dumps((file, piece.dtype, piece.shape))


def _open(handle: bytes, device: torch.device) -> torch.Tensor:
    """A piece, [layers, blocks, heads, block size, width]. Raises OSError if who made it is gone."""
    try:
        if device.type != "cuda":
            file, dtype, shape = pickle.loads(handle)
            return torch.from_file(file, shared=True, size=shape.numel(), dtype=dtype).view(shape)
        arguments = list(pickle.loads(handle))
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
        opened: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments)
        return opened
    except RuntimeError as error:
        raise OSError(f"KV blocks in another process's memory cannot be opened: {error}") from error
