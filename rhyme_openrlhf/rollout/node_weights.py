"""The node's side of the weight buffer: one shared-memory copy of a weight version for all engines of the node.

One `NodeWeights` actor runs on each node that has engines. It fetches the buckets (Ray moves each to the node once)
and writes them into one file on tmpfs, which the engines' worker processes map: they are not Ray workers and cannot
map Ray's own store. RhymeRL, section 4.2 (weight buffers on host memory).

Invariants: at most KEPT versions exist at a time; a segment appears under its name only when it is whole; segments
that a dead run left behind are removed when a store starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import ray

from rhyme_openrlhf.ray_classes import WITHOUT_TORCH
from rhyme_openrlhf.rollout.shared_files import SHARED_MEMORY, owned_prefix, remove_stale
from rhyme_openrlhf.training.weight_buckets import Entry, Segment, WeightVersion, place

# The one in use and the one being fetched.
KEPT = 2
PREFIX = "rhyme-weights"


class WeightSpaceError(RuntimeError):
    """The node's shared memory cannot hold a weight version."""


class SegmentStore:
    """Writes weight versions as files of one folder and keeps the newest KEPT."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        remove_stale(PREFIX, folder)
        self._folder = folder
        self._segments: dict[int, Segment] = {}

    def store(self, weights: WeightVersion, arrays: Iterable[np.ndarray]) -> Segment:
        """Write a version from its buckets' contents (uint8 arrays, in the order of `weights.buckets`).

        Raises WeightSpaceError when the folder has too little room.
        """
        if weights.version in self._segments:
            return self._segments[weights.version]
        while len(self._segments) >= KEPT:
            self._remove(min(self._segments))
        name = f"{owned_prefix(PREFIX)}{weights.version}"
        partial = self._folder / f"{name}.partial"
        self._check_room(weights.nbytes)
        entries: list[Entry] = []
        start = 0
        with partial.open("wb") as file:
            for published, array in zip(weights.buckets, arrays, strict=True):
                array.tofile(file)
                placed, end = place([entry.parameter for entry in published.bucket.entries], start)
                entries += placed
                start = end
        path = partial.rename(self._folder / name)
        segment = Segment(weights.version, str(path), start, tuple(entries))
        self._segments[weights.version] = segment
        return segment

    def _check_room(self, nbytes: int) -> None:
        status = os.statvfs(self._folder)
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise WeightSpaceError(
                f"{self._folder} on node {os.uname().nodename} has {free >> 20} MB free, but a weight version needs "
                f"{-(-nbytes >> 20)} MB: enlarge it (docker: --shm-size) or use --weights.transport openrlhf"
            )

    def _remove(self, version: int) -> None:
        Path(self._segments.pop(version).path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove every segment of this store."""
        for version in list(self._segments):
            self._remove(version)


class PlainNodeWeights:
    """The Ray actor of one node: fetches a version's buckets and stores them as a segment."""

    def __init__(self) -> None:
        self._store = SegmentStore()

    def fetch(self, weights: WeightVersion) -> Segment:
        """Bring a version to this node. Raises WeightSpaceError, or Ray's own errors for lost buckets."""
        return self._store.store(weights, ray.get([published.ref for published in weights.buckets]))

    def close(self) -> None:
        """Remove this node's segments; the last thing a run asks of it."""
        self._store.close()


NodeWeights = ray.remote(num_cpus=0, runtime_env={"env_vars": WITHOUT_TORCH})(PlainNodeWeights)
