"""The buckets that a weight version is cut into, and their description. Pure: sizes in, plan out.

The policy's data-parallel ranks publish a version in parallel. Each rank writes its own buckets into the segment of its
node, a file in shared memory (segment_file.py). A run plans its buckets once; every version has the same.

Invariants: every parameter is in exactly one bucket. A bucket holds at most `bucket_bytes` unless a single parameter is
larger. The rank with the fewest bytes so far gets the next bucket, so ranks carry nearly equal loads. Every tensor
starts at a multiple of ALIGNMENT.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
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
    """The place of a parameter inside a bucket (or a segment): `offset` in bytes."""

    parameter: Parameter
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Some parameters packed one after the other by one rank."""

    rank: int
    nbytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Span:
    """The place of a bucket in a segment: entries `first` to `end`, bytes `start` to `stop`."""

    first: int
    end: int
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A numbered weight version in one shared-memory file of a node; 0 is untrained, n is after training step n.

    The file has the table of its parameters (segment_file.py), so this is small for every model. `paths` are the paths
    of the same version on other nodes that have ranks of an engine: (Ray's id of the node, path).
    """

    version: int
    path: str
    paths: tuple[tuple[str, str], ...] = ()

    def path_on(self, node: str) -> str:
        """Return the path of this version on a node, by Ray's id of the node."""
        return dict(self.paths).get(node, self.path)

    def to_plain(self) -> list[Any]:
        """Return the segment as lists, strings and numbers: vLLM's message format brings no dataclasses back."""
        return [self.version, self.path, [list(pair) for pair in self.paths]]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Segment:
        """Return the segment that `to_plain` described."""
        version, path, paths = plain
        return cls(version, path, tuple((node, there) for node, there in paths))


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


def lay_out(buckets: Sequence[Bucket]) -> tuple[tuple[Entry, ...], tuple[Span, ...]]:
    """Lay buckets one after the other into a segment; return all entries, and where each bucket is."""
    entries: list[Entry] = []
    spans = []
    start = 0
    for bucket in buckets:
        placed, stop = place([entry.parameter for entry in bucket.entries], start)
        spans.append(Span(len(entries), len(entries) + len(placed), start, stop))
        entries += placed
        start = stop
    return tuple(entries), tuple(spans)


def writers(
    buckets: Sequence[Bucket], rank_nodes: Sequence[str], targets: Collection[str]
) -> tuple[dict[str, int], ...]:
    """Return which rank writes each bucket on which node: one dictionary of node to rank for each bucket.

    `rank_nodes` are the nodes of the policy's ranks, `targets` the nodes that have ranks of engines. A node that has
    both gets all buckets from its own ranks, so that nothing crosses the network. Where no node has both, each rank
    writes its own buckets, on its own node, and the targets fetch them.
    """
    local = {node: [rank for rank, its in enumerate(rank_nodes) if its == node] for node in dict.fromkeys(rank_nodes)}
    shared = [node for node in local if node in targets]
    if not shared:
        return tuple({rank_nodes[bucket.rank]: bucket.rank} for bucket in buckets)
    return tuple({node: local[node][bucket.rank % len(local[node])] for node in shared} for bucket in buckets)


def written_by(writers: Sequence[dict[str, int]], ranks: int) -> list[list[int]]:
    """Return for each rank the numbers of the buckets that it writes, from what `writers` returned."""
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for number, of_bucket in enumerate(writers):
        for rank in of_bucket.values():
            mine[rank].append(number)
    return mine


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
