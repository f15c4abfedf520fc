"""The node's side of the weight buffer: one shared-memory copy of a weight version for all engines of the node.

One `NodeWeights` actor runs on each node that has ranks of engines, or of a policy whose engines are elsewhere. It
makes the file on tmpfs that the policy's ranks of its node write into and the engines' workers map. A node without
ranks of the policy fetches the buckets from the stores that have them, through Ray's object store. RhymeRL, section
4.2 (weight buffers on host memory).

Invariants: at most KEPT versions exist at a time, each in a file with room for all of it. The file of the oldest one is
used again, because new memory costs more than copying. Marks say which parameters of a version are whole
(segment_file.py). Segments that a dead run left behind are removed when a store starts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rhyme_openrlhf.ray_classes import WITHOUT_TORCH
from rhyme_openrlhf.shared_files import SHARED_MEMORY, OwnedFiles
from rhyme_openrlhf.weights.buckets import Bucket, Segment, lay_out
from rhyme_openrlhf.weights.segment_file import MARK_BYTES, SegmentFile, description

# The one in use and the one being fetched.
KEPT = 2
PREFIX = "rhyme-weights"


class WeightSpaceError(RuntimeError):
    """The node's shared memory cannot hold a weight version."""


class SegmentStore:
    """Makes files for weight versions of these buckets in one folder and keeps the newest KEPT."""

    def __init__(self, buckets: Sequence[Bucket], folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._files = OwnedFiles(PREFIX, folder)
        self._segments: dict[int, Segment] = {}
        entries, self.spans = lay_out(buckets)
        nbytes = sum(bucket.nbytes for bucket in buckets)
        self._described_at = nbytes + MARK_BYTES * len(entries)
        self._description = description(entries, nbytes)

    def begin(self, version: int) -> Segment:
        """Make room for a version, of which nothing is there yet. Raises WeightSpaceError when there is too little."""
        segment = Segment(version, self._files.path(str(version)))
        used = self._segments.pop(version, None)
        if used is None and len(self._segments) == KEPT:
            used = self._segments.pop(min(self._segments))
        if used is None:
            self._allocate(segment)
        else:
            with closing(SegmentFile(used.path)) as file:
                file.clear()
            self._files.rename(used.path, str(version))
        self._segments[version] = segment
        return segment

    def store(self, version: int, arrays: Iterable[np.ndarray]) -> Segment:
        """Write a version from its buckets' contents (uint8 arrays, in the order of the buckets).

        Raises WeightSpaceError when the folder has too little room.
        """
        segment = self.begin(version)
        with closing(SegmentFile(segment.path)) as file:
            for span, array in zip(self.spans, arrays, strict=True):
                file.data[span.start : span.stop] = array
                file.mark(span.first, span.end, version)
        return segment

    def _allocate(self, segment: Segment) -> None:
        """Make a segment's file, under its name only when it has all its memory and describes itself."""
        nbytes = self._described_at + len(self._description)
        self._check_room(nbytes)
        partial = self._files.make(f"{segment.version}.partial")
        descriptor = os.open(partial, os.O_RDWR)
        try:
            # Beyond what there is, a write to a mapping ends the process; this says so before.
            os.posix_fallocate(descriptor, 0, nbytes)
            os.pwrite(descriptor, self._description, self._described_at)
        except OSError as error:
            self._files.remove(partial)
            if error.errno != errno.ENOSPC:
                raise
            raise self._no_room(nbytes) from None
        finally:
            os.close(descriptor)
        self._files.rename(partial, str(segment.version))

    def _check_room(self, nbytes: int) -> None:
        if self._free() < nbytes:
            raise self._no_room(nbytes)

    def _free(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize

    def _no_room(self, nbytes: int) -> WeightSpaceError:
        return WeightSpaceError(
            f"{self._folder} on node {os.uname().nodename} has {self._free() >> 20} MB free, but a weight version "
            f"needs {-(-nbytes >> 20)} MB: enlarge it (docker: --shm-size) or use --weights.transport openrlhf"
        )

    def _remove(self, version: int) -> None:
        self._files.remove(self._segments.pop(version).path)

    def close(self) -> None:
        """Remove every segment of this store."""
        for version in list(self._segments):
            self._remove(version)


class PlainNodeWeights:
    """The Ray actor of one node: keeps the node's segments and sends and fetches buckets.

    Buckets go in a thread of their own, so that `begin` and `close` wait for none that never comes.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._store = SegmentStore(buckets)

    def begin(self, version: int) -> Segment:
        """Make room for a version on this node. Raises WeightSpaceError."""
        return self._store.begin(version)

    @ray.method(concurrency_group="buckets")
    def share(self, segment: Segment, number: int) -> np.ndarray:
        """Return a bucket of this node's segment as soon as it is there. Raises SegmentGoneError."""
        span = self._store.spans[number]
        with closing(SegmentFile(segment.path)) as file:
            file.wait_for(segment.version, span.first, span.end)
            return file.data[span.start : span.stop]

    @ray.method(concurrency_group="buckets")
    def fetch(self, segment: Segment, buckets: list[Any]) -> None:
        """Write all buckets (references to what `share` of other nodes returns) into this node's segment."""
        spans = dict(zip(buckets, self._store.spans, strict=True))
        coming = list(buckets)
        with closing(SegmentFile(segment.path)) as file:
            while coming:
                (come,), coming = ray.wait(coming, num_returns=1)
                span = spans[come]
                file.data[span.start : span.stop] = ray.get(come)
                file.mark(span.first, span.end, segment.version)

    def close(self) -> None:
        """Remove this node's segments; the last thing a run asks of it."""
        self._store.close()


NodeWeights = ray.remote(num_cpus=0, runtime_env={"env_vars": WITHOUT_TORCH}, concurrency_groups={"buckets": 1})(
    PlainNodeWeights
)
