"""A segment's file as one process sees it: mapped, pinned where CUDA is, with the marks that say what has arrived.

The policy's ranks, the node's store and the engines' workers all map the same file, so a version lies in a node's
memory once. A parameter's mark is the number of its version plus one, written when the parameter is whole. So an
engine loads the first buckets while the policy still writes the last ones.

Invariants: a mark is cleared before its parameter is written, and set after. `tensors` gives no parameter before its
mark is set. `check` raises when the file was taken for another version meanwhile: no mixture of two versions is
reported as loaded. Pinned memory stays pinned for as long as its file exists, because pinning takes as long as a load.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.weights.buckets import MARK_BYTES, Entry, Segment

POLL_SECONDS = 0.001
MARK = np.dtype("<i8")


class SegmentGoneError(RuntimeError):
    """A segment was removed, or taken for another version, before it was read."""


class SegmentFile:
    """One segment's file, mapped. `descriptor` is the open file."""

    def __init__(self, path: str, nbytes: int, marks: int) -> None:
        self.descriptor = os.open(path, os.O_RDWR)
        self._nbytes = nbytes
        self._marks = marks
        self._map = mmap.mmap(self.descriptor, nbytes) if nbytes else b""
        self.data = np.frombuffer(self._map, dtype=np.uint8, count=nbytes)
        """The parameters' bytes."""

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
            file = self._open[inode] = SegmentFile(path, segment.nbytes, len(segment.entries))
            _pin(file.data)
        return self._open[inode]


def tensors(file: SegmentFile, segment: Segment) -> Iterator[tuple[str, Any]]:
    """Yield every parameter of a segment as a view into the mapped file, as soon as it is there (copy before writing).

    Raises SegmentGoneError.
    """
    arrived = 0
    for number, entry in enumerate(segment.entries):
        if number >= arrived:
            arrived = file.wait_for(segment.version, number, number + 1)
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
