"""A worker's draft indexes within its share of the node's memory: the rest is on the disk, compressed.

The index that leaves memory first is that of the prompt with the latest recorded responses. Each prompt comes once an
epoch, in random order. So the next prompts are among those not yet seen in this epoch, and the index that was just
recorded is needed last of all. The usual rule, least recently used first, would write out the very indexes that are
needed next.

Invariants:
- The indexes in memory never exceed the limit, after any `put` or load. An index larger than the limit goes to the
  disk at once.
- Losing an index loses no data, because it can be rebuilt from the responses (history/shard.py). A full disk or a
  damaged file costs only the time to rebuild. A disk that cannot be written is reported once.
- A file holds the index of one version of a prompt's history: `drop` removes it from memory and disk alike.
- Files of an earlier process of this worker are never read: the directory is emptied at the start.

One caller at a time, but `resident` may be called from any thread.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.history.record import packed, unpacked

SUFFIX = ".index"


@dataclass(frozen=True)
class _File:
    """A compressed index on the disk: its size there, and its size in memory."""

    disk_bytes: int
    nbytes: int


@dataclass(frozen=True)
class StoreState:
    """Numbers of indexes in memory (`resident`) and on the disk alone (`spilled`), with their bytes there."""

    resident: int
    spilled: int
    resident_bytes: int
    spilled_bytes: int


class IndexStore:
    """Draft indexes by prompt key. `say` is called once, with one sentence, when the disk cannot be written."""

    def __init__(self, directory: Path, limit_bytes: int, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._limit = limit_bytes
        self._say = say
        self._said = False
        # From the index needed first to the one needed last.
        self._resident: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        self._resident_bytes = 0
        self._files: dict[str, _File] = {}
        shutil.rmtree(directory, ignore_errors=True)

    def set_limit(self, limit_bytes: int) -> None:
        """Keep at most this much in memory from now on."""
        self._limit = limit_bytes
        self._make_room(0)

    def resident(self, key: str) -> NDArray[np.uint8] | None:
        """Return the index of a prompt if it is in memory, else None."""
        return self._resident.get(key)

    def put(self, key: str, index: NDArray[np.uint8], *, soon: bool = False) -> None:
        """Keep a prompt's newly built index, which is needed after all others or, with `soon`, before them."""
        self.drop(key)
        if self._make_room(index.nbytes, others_leave=soon):
            self._keep(key, index, first=soon)
        else:
            self._spill(key, index)

    def bring(self, key: str) -> NDArray[np.uint8] | None:
        """Return the index of a prompt that is about to be needed, from memory or disk; None if it has to be built."""
        index = self._resident.get(key)
        if index is None:
            index = self._read(key)
            if index is None:
                return None
            if self._make_room(index.nbytes):
                self._keep(key, index, first=True)
        else:
            self._resident.move_to_end(key, last=False)
        return index

    def drop(self, key: str) -> None:
        """Forget a prompt's index."""
        index = self._resident.pop(key, None)
        if index is not None:
            self._resident_bytes -= index.nbytes
        self._forget_file(key)

    @property
    def overflows(self) -> bool:
        """Return whether some indexes did not fit into memory."""
        return bool(self._files)

    def state(self) -> StoreState:
        """Return how many indexes, and how many bytes of them, are in memory and on the disk alone."""
        on_disk_alone = [file for key, file in self._files.items() if key not in self._resident]
        return StoreState(
            len(self._resident),
            len(on_disk_alone),
            self._resident_bytes,
            sum(file.disk_bytes for file in on_disk_alone),
        )

    def close(self) -> None:
        """Delete the files on the disk."""
        self._files.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _keep(self, key: str, index: NDArray[np.uint8], *, first: bool) -> None:
        self._resident[key] = index
        self._resident_bytes += index.nbytes
        if first:
            self._resident.move_to_end(key, last=False)

    def _make_room(self, nbytes: int, *, others_leave: bool = True) -> bool:
        """Make room for `nbytes`, moving others to the disk only with `others_leave`; return whether they fit."""
        if nbytes > self._limit:
            return False
        while self._resident_bytes + nbytes > self._limit:
            if not others_leave:
                return False
            key, index = self._resident.popitem(last=True)
            self._resident_bytes -= index.nbytes
            if key not in self._files:
                self._spill(key, index)
        return True

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{SUFFIX}"

    def _spill(self, key: str, index: NDArray[np.uint8]) -> None:
        block = packed(index)
        try:
            # What people's models said is nobody else's to read, in a temporary directory least of all.
            self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(exist_ok=True)
            self._path(key).write_bytes(block)
        except OSError as error:
            self._remove(key)
            if not self._said:
                self._said = True
                self._say(
                    f"cannot write draft indexes to {self._directory} ({error.strerror}): those that do not fit into "
                    "memory are built again when they are asked for, so drafts come later"
                )
            return
        self._files[key] = _File(len(block), index.nbytes)

    def _read(self, key: str) -> NDArray[np.uint8] | None:
        file = self._files.get(key)
        if file is None:
            return None
        try:
            index = unpacked(self._path(key).read_bytes(), file.nbytes)
        except (OSError, ValueError):
            self._forget_file(key)
            return None
        index.flags.writeable = False
        return index

    def _forget_file(self, key: str) -> None:
        if self._files.pop(key, None) is not None:
            self._remove(key)

    def _remove(self, key: str) -> None:
        # A file that cannot be removed is never read again, so the error does no harm.
        with suppress(OSError):
            self._path(key).unlink()
