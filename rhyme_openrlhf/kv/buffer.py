"""The place of KV blocks between two engines: one contiguous buffer in (layer, block) order (RLHFSpec, section 6).

A buffer is for one sample, and has room for its handover behind the blocks. It holds all KV heads, so engines of any
tensor-parallel size write and read their own (`head_share`): resharding is which heads a rank copies. A worker opens it
by its plain description. It is a file on tmpfs, for engines of one node; between two nodes each has one, and rows go
from one to the other (engine/actor_parts/devices.py).

Behind the blocks is the sample's handover: what its engine writes when it stops the sample, for the engine that expects
it. Both engine cores reach it without a message: the destination looks for it between two of its steps.

Invariants: a buffer's owner makes and removes it, workers only open it. No room on the tmpfs is an OSError of the
worker that writes, not a bus error. A buffer whose owner is gone is removed when the next store starts.
A handover is there whole or not at all (its length, written last, says so); it is written once, by an engine that
generates for the sample no more.
"""

from __future__ import annotations

import os
import struct
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from rhyme_openrlhf.shared_files import SHARED_MEMORY, OwnedFiles

PREFIX = "rhyme-move"
# Before a handover: how long it is, 0 for as long as there is none.
_LENGTH = struct.Struct("<q")
# Of a token as msgpack writes it, at most; of the rest, with a generator's state (5 kB of a Mersenne twister on CPU).
_TOKEN_BYTES = 5
_REST_BYTES = 16384


class Handover(msgspec.Struct, frozen=True):
    """`tokens`: the whole response so far; the rest as in `Stopped` and `Progress` (engine/messages.py)."""

    tokens: list[int]
    computed: int
    blocks: int
    window: int | None = None
    generator: bytes | None = None


_DECODER = msgspec.msgpack.Decoder(Handover)


class HeadShare(NamedTuple):
    """Heads `first` to `end` of all of a layer's KV heads; `writes`: no rank before this one has the same."""

    first: int
    end: int
    writes: bool


def head_share(rank: int, ranks: int, heads: int) -> HeadShare:
    """Return the share of rank `rank` of `ranks`, of `heads` KV heads in all, as vLLM 0.29.0 shards them.

    With more ranks than heads each head is on several ranks, which hold the same. Raises ValueError where neither
    number divides the other: no engine runs so.
    """
    if heads % ranks == 0:
        each = heads // ranks
        return HeadShare(rank * each, (rank + 1) * each, True)
    if ranks % heads == 0:
        replicas = ranks // heads
        return HeadShare(rank // replicas, rank // replicas + 1, rank % replicas == 0)
    raise ValueError(f"{heads} KV heads cannot be shared by {ranks} ranks")


@dataclass(frozen=True)
class KvLayout:
    """The form of a KV cache: per layer and block [heads, block_size, width], keys and values side by side.

    `heads`: of all ranks together. Two engines can hand blocks over if theirs are equal.
    """

    layers: int
    heads: int
    block_size: int
    width: int
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return int(torch.empty((), dtype=getattr(torch, self.dtype)).element_size())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, all heads."""
        return self.heads * self.block_size * self.width * self.item_bytes


@dataclass(frozen=True)
class KvBuffer:
    """A buffer's description: all that a worker needs to open it. `rows`: blocks it has room for."""

    path: str
    rows: int
    layout: KvLayout

    def to_plain(self) -> dict[str, Any]:
        """Return the description for a call to vLLM's workers."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> KvBuffer:
        return cls(**{**plain, "layout": KvLayout(**plain["layout"])})

    @property
    def handover_offset(self) -> int:
        """The place in the file where the sample is handed over: behind the blocks."""
        return self.layout.layers * self.rows * self.layout.block_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        tokens = self.rows * self.layout.block_size
        return self.handover_offset + _LENGTH.size + tokens * _TOKEN_BYTES + _REST_BYTES

    def open(self) -> torch.Tensor:
        """Return the buffer, [layers, rows, heads, block_size, width]. Raises OSError if it is not there (any more)."""
        layout = self.layout
        shape = (layout.layers, self.rows, layout.heads, layout.block_size, layout.width)
        size = self.handover_offset
        if os.stat(self.path).st_size != self.file_bytes:
            raise OSError(f"the buffer {self.path} is not of {self.file_bytes} bytes")
        flat = torch.from_file(
            self.path, shared=True, size=size // layout.item_bytes, dtype=getattr(torch, layout.dtype)
        )
        return flat.view(shape)

    def allocate(self, first: int, end: int) -> None:
        """Have room for blocks `first` to `end` of every layer. Raises OSError if there is none."""
        block, descriptor = self.layout.block_bytes, os.open(self.path, os.O_RDWR)
        try:
            for layer in range(self.layout.layers):
                os.posix_fallocate(descriptor, (layer * self.rows + first) * block, (end - first) * block)
        finally:
            os.close(descriptor)


class KvBufferStore:
    """Makes and removes the buffers of one process."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._files = OwnedFiles(PREFIX, folder)

    def make(self, layout: KvLayout, rows: int) -> KvBuffer:
        """Return a new buffer for `rows` blocks; it takes up memory only as it is written. Raises OSError."""
        buffer = KvBuffer(self._files.make(uuid.uuid4().hex), rows, layout)
        os.truncate(buffer.path, buffer.file_bytes)
        return buffer

    def remove(self, buffer: KvBuffer) -> None:
        """Remove a buffer; who has it open may go on reading. Safe to do twice."""
        self._files.remove(buffer.path)


def read_rows(buffer: KvBuffer, first: int, end: int) -> np.ndarray:
    """Return blocks `first` to `end` of every layer, as bytes [layers, (end - first) * block_bytes]. Raises OSError."""
    layout = buffer.layout
    rows = np.empty((layout.layers, (end - first) * layout.block_bytes), np.uint8)
    descriptor = os.open(buffer.path, os.O_RDONLY)
    try:
        for layer, row in enumerate(rows):
            if os.preadv(descriptor, [row.data], (layer * buffer.rows + first) * layout.block_bytes) != row.nbytes:
                raise OSError(f"{buffer.path} ends before block {end} of layer {layer}")
    finally:
        os.close(descriptor)
    return rows


def write_rows(buffer: KvBuffer, first: int, rows: np.ndarray) -> None:
    """Write what `read_rows` returns, from block `first` on. Raises OSError without buffer or room."""
    descriptor = os.open(buffer.path, os.O_WRONLY)
    try:
        for layer, row in enumerate(rows):
            if os.pwrite(descriptor, row, (layer * buffer.rows + first) * buffer.layout.block_bytes) != row.nbytes:
                raise OSError(f"{buffer.path} has no room for the blocks of layer {layer}")
    finally:
        os.close(descriptor)


def write_handover(buffer: KvBuffer, handover: Handover) -> None:
    """Hand a buffer's sample over. Raises OSError if the buffer is gone, or it or its file system has no room."""
    text = msgspec.msgpack.encode(handover)
    descriptor, offset = os.open(buffer.path, os.O_RDWR), buffer.handover_offset
    try:
        if offset + _LENGTH.size + len(text) > os.fstat(descriptor).st_size:
            raise OSError(f"{buffer.path} has no room for a handover of {len(text)} bytes")
        os.pwrite(descriptor, text, offset + _LENGTH.size)
        os.pwrite(descriptor, _LENGTH.pack(len(text)), offset)
    finally:
        os.close(descriptor)


def read_handover(buffer: KvBuffer) -> Handover | None:
    """Return what was handed over with a buffer's sample; None if nothing is, or the buffer is gone."""
    try:
        descriptor, offset = os.open(buffer.path, os.O_RDONLY), buffer.handover_offset
    except FileNotFoundError:
        return None
    try:
        (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, offset))
        return _DECODER.decode(os.pread(descriptor, length, offset + _LENGTH.size)) if length else None
    finally:
        os.close(descriptor)
