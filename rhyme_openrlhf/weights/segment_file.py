"""A segment's file as one process sees it: mapped, pinned where CUDA is, with the marks that say what has arrived.

The policy's ranks, the node's store and the engines' workers all map the same file, so a version lies in a node's
memory once. The file has, one after the other:

1. the parameters,
2. a mark of 8 bytes for each: the number of its version plus one, written when the parameter is whole. So an engine
   loads the first buckets while the policy still writes the last ones,
3. the table of the parameters: names, shapes, dtypes and offsets. So nobody sends it with a version,
4. how many bytes the parameters are, and how many there are.

Invariants: a mark is cleared before its parameter is written, and set after. `tensors` gives no parameter before its
mark is set. `check` raises when the file was taken for another version meanwhile: no mixture of two versions is
reported as loaded. Pinned memory stays pinned for as long as its file exists, because pinning takes as long as a load.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.weights.buckets import Entry, Parameter, Segment

POLL_SECONDS = 0.001
MARK = np.dtype("<i8")
MARK_BYTES = 8
# The last bytes of the file.
SIZES = struct.Struct("<qq")


class SegmentGoneError(RuntimeError):
    """A segment was removed, or taken for another version, before it was read."""


def description(entries: Sequence[Entry], nbytes: int) -> bytes:
    """Return what follows the marks in a file of these parameters, which are `nbytes` bytes."""
    rows = [[e.offset, e.parameter.name, e.parameter.shape, e.parameter.dtype, e.parameter.nbytes] for e in entries]
    return json.dumps(rows).encode() + SIZES.pack(nbytes, len(entries))


class SegmentFile:
    """One segment's file, mapped. `descriptor` is the open file."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDWR)
        self._end = os.fstat(self.descriptor).st_size - SIZES.size
        self._nbytes, self._marks = SIZES.unpack(os.pread(self.descriptor, SIZES.size, self._end))
        self._map = mmap.mmap(self.descriptor, self._nbytes) if self._nbytes else b""
        self.data = np.frombuffer(self._map, dtype=np.uint8, count=self._nbytes)
        """The parameters' bytes."""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The parameters and their places in the file."""
        start = self._nbytes + MARK_BYTES * self._marks
        rows = json.loads(os.pread(self.descriptor, self._end - start, start))
        return tuple(Entry(Parameter(name, tuple(shape), dtype, size), at) for at, name, shape, dtype, size in rows)

    @property
    def is_removed(self) -> bool:
        """True if the file has no name any more."""
        return os.fstat(self.descriptor).st_nlink == 0

    def clear(self) -> None:
        """Mark every parameter as not there."""
        self.mark(0, self._marks, -1)

    def mark(self, first: int, end: int, version: int) -> None:
        """Mark entries `first` to `end` as those of `version`."""
        # By a system call, which no write to the mapping before it overtakes on any processor.
        os.pwrite(self.descriptor, np.full(end - first, version + 1, MARK).tobytes(), self._nbytes + MARK_BYTES * first)

    def versions(self) -> np.ndarray:
        """Return the version of each entry, -1 where it is being written."""
        read = os.pread(self.descriptor, MARK_BYTES * self._marks, self._nbytes)
        return np.frombuffer(read, MARK).astype(np.int64) - 1

    def wait_for(self, version: int, first: int, end: int) -> int:
        """Wait until entries `first` to `end` have arrived; return the number of entries from 0 on that have.

        Raises SegmentGoneError.
        """
        while True:
            there = self.versions() == version
            if there[first:end].all():
                return int(there.size if there.all() else there.argmin())
            self.check(version, whole=False)
            time.sleep(POLL_SECONDS)

    def check(self, version: int, whole: bool = True) -> None:
        """Raise SegmentGoneError if the file has gone, or has another version; `whole`: or not all of this one."""
        if self.is_removed:
            raise SegmentGoneError(f"weight version {version} was removed before it was loaded")
        found = self.versions()
        if not np.isin(found, (version,) if whole else (version, -1)).all():
            raise SegmentGoneError(
                f"weight version {version} was overwritten by version {found.max()} while it was read"
            )

    def close(self) -> None:
        """Give the file back; the mapping ends when nothing looks into it any more."""
        os.close(self.descriptor)


class SegmentFiles:
    """The files that a process with torch has mapped, by their inode: a store reuses files under new names."""

    def __init__(self) -> None:
        self._open: dict[int, SegmentFile] = {}

    def open(self, segment: Segment, node: str = "") -> SegmentFile:
        """Map a segment, or find it mapped; forget those that are removed. Raises OSError if it is not there."""
        for inode, file in list(self._open.items()):
            if file.is_removed:
                _unpin(file.data)
                file.close()
                del self._open[inode]
        path = segment.path_on(node)
        inode = os.stat(path).st_ino
        if inode not in self._open:
            file = self._open[inode] = SegmentFile(path)
            _pin(file.data)
        return self._open[inode]


def tensors(file: SegmentFile, version: int) -> Iterator[tuple[str, Any]]:
    """Yield every parameter of a version as a view into the mapped file, as soon as it is there (copy before writing).

    Raises SegmentGoneError.
    """
    arrived = 0
    for number, entry in enumerate(file.entries):
        if number >= arrived:
            arrived = file.wait_for(version, number, number + 1)
        yield entry.parameter.name, view(file, entry)


def view(file: SegmentFile, entry: Entry) -> Any:
    """Return a parameter in a file as a tensor."""
    import torch

    parameter = entry.parameter
    raw = torch.from_numpy(file.data[entry.offset : entry.offset + parameter.nbytes])
    return raw.view(getattr(torch, parameter.dtype)).view(parameter.shape)


def _pin(data: np.ndarray) -> None:
    """Pin memory where CUDA is, so that the device copies from and to it at the speed of its link."""
    if not gpu_present() or not data.size:
        return
    import torch

    code = int(torch.cuda.cudart().cudaHostRegister(data.ctypes.data, data.nbytes, 0))
    if code:
        print(f"rhyme: {data.nbytes >> 20} MB of weights could not be pinned (CUDA error {code}): copies are slower")


def _unpin(data: np.ndarray) -> None:
    if gpu_present() and data.size:
        import torch

        torch.cuda.cudart().cudaHostUnregister(data.ctypes.data)
