"""How a weight version is cut into buckets, and what describes one. Pure: sizes in, plan out.

A version is published by the policy's data-parallel ranks in parallel: each rank packs the buckets that are its own.
Invariants: every parameter is in exactly one bucket; a bucket holds at most `bucket_bytes` unless a single parameter
is larger; buckets are dealt to the rank with the fewest bytes so far, so ranks carry nearly equal loads; every tensor
starts at a multiple of ALIGNMENT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Covers a cache line and every dtype's own alignment, so that a tensor can be a view into the bucket.
ALIGNMENT = 64


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model: its full (gathered) shape, and its dtype as torch names it ("bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Entry:
    """Where a parameter lies inside a bucket (or a segment): `offset` in bytes."""

    parameter: Parameter
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Some parameters packed one after the other by one rank."""

    rank: int
    nbytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class PublishedBucket:
    """A packed bucket in Ray's object store: `ref` resolves to a NumPy array of `bucket.nbytes` bytes."""

    bucket: Bucket
    ref: Any


@dataclass(frozen=True)
class WeightVersion:
    """One numbered version of the policy's weights: the weights after training step `version` (0: untrained)."""

    version: int
    buckets: tuple[PublishedBucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(published.bucket.nbytes for published in self.buckets)


@dataclass(frozen=True)
class Segment:
    """A weight version in one shared-memory file of a node; offsets are from the start of the file."""

    version: int
    path: str
    nbytes: int
    entries: tuple[Entry, ...] = field(repr=False)

    def to_plain(self) -> list[Any]:
        """As lists, strings and numbers: vLLM's message format does not bring dataclasses back as such."""
        rows = [[entry.offset, *dataclasses.astuple(entry.parameter)] for entry in self.entries]
        return [self.version, self.path, self.nbytes, rows]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Segment:
        """The segment that `to_plain` described."""
        version, path, nbytes, rows = plain
        entries = tuple(Entry(Parameter(name, tuple(shape), dtype, size), at) for at, name, shape, dtype, size in rows)
        return cls(version, path, nbytes, entries)


def plan_buckets(parameters: Sequence[Parameter], bucket_bytes: int, ranks: int) -> tuple[Bucket, ...]:
    """Cut `parameters`, in their order, into buckets and deal them to `ranks` ranks.

    Raises ValueError for no rank, a bucket size that is not positive, or a parameter named twice.
    """
    if ranks < 1 or bucket_bytes < 1:
        raise ValueError(f"needs at least one rank and one byte a bucket, got {ranks} and {bucket_bytes}")
    names = [parameter.name for parameter in parameters]
    if len(set(names)) != len(names):
        raise ValueError("a parameter is named twice")
    groups: list[list[Parameter]] = []
    used = bucket_bytes
    for parameter in parameters:
        size = aligned(parameter.nbytes)
        if used + size > bucket_bytes:
            groups.append([])
            used = 0
        groups[-1].append(parameter)
        used += size
    loads = [0] * ranks
    buckets = []
    for group in groups:
        entries, size = place(group)
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += size
        buckets.append(Bucket(rank, size, entries))
    return tuple(buckets)


def place(parameters: Sequence[Parameter], start: int = 0) -> tuple[tuple[Entry, ...], int]:
    """Lay parameters one after the other from byte `start`; returns their entries and the first free byte."""
    entries = []
    offset = start
    for parameter in parameters:
        entries.append(Entry(parameter, offset))
        offset += aligned(parameter.nbytes)
    return tuple(entries), offset


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
