"""A worker's draft indexes within its share of the node's memory: the rest is on the disk, compressed.

Which index leaves memory: the one whose prompt was answered last. Prompts come once an epoch in random order, so the
next to come are among those not yet seen in this epoch, and what was just recorded is needed last of all. (The usual
rule, least recently used goes first, would write out just what is about to be asked for.)

Invariants:
- What is in memory is at most the limit, whatever is put or loaded; an index larger than that goes to the disk at once.
- Nothing here is needed to be right: an index is made again from the responses (history/shard.py). So a disk that is
  full, or a file that is damaged, costs the time to build it, is told once, and nothing else.
- A file is of one version of a prompt's history: `drop` forgets memory and disk alike.
- Nothing is read that another life of the worker left: the directory is emptied at the start.

One caller at a time, but `resident` may be asked from any thread.
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
    """A compressed index on the disk: its size there, and what it was."""

    disk_bytes: int
    nbytes: int


@dataclass(frozen=True)
class StoreState:
    """How many indexes are in memory and how many on the disk alone, and their bytes there."""

    resident: int
    spilled: int
    resident_bytes: int
    spilled_bytes: int


class IndexStore:
    """Draft indexes by prompt key. `say` gets one sentence when the disk does not take what it should, once."""

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
        """The index of a prompt if it is in memory."""
        return self._resident.get(key)

    def put(self, key: str, index: NDArray[np.uint8], *, soon: bool = False) -> None:
        """Keep a prompt's index, which was just built: it is needed after all others, or `soon`, before them."""
        self.drop(key)
        if self._make_room(index.nbytes, others_leave=soon):
            self._keep(key, index, first=soon)
        else:
            self._spill(key, index)

    def bring(self, key: str) -> NDArray[np.uint8] | None:
        """The index of a prompt that is about to be needed, from memory or disk; None if it has to be built."""
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

    def state(self) -> StoreState:
        """What is where."""
        on_disk_alone = [file for key, file in self._files.items() if key not in self._resident]
        return StoreState(
            len(self._resident),
            len(on_disk_alone),
            self._resident_bytes,
            sum(file.disk_bytes for file in on_disk_alone),
        )

    def close(self) -> None:
        """Give the disk back."""
        self._files.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _keep(self, key: str, index: NDArray[np.uint8], *, first: bool) -> None:
        self._resident[key] = index
        self._resident_bytes += index.nbytes
        if first:
            self._resident.move_to_end(key, last=False)

    def _make_room(self, nbytes: int, *, others_leave: bool = True) -> bool:
        """Whether `nbytes` more fit, once others have left memory (none, unless `others_leave`)."""
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
            self._directory.mkdir(parents=True, exist_ok=True)
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
        # A file that cannot be removed is not read any more, and the disk has been complained of.
        with suppress(OSError):
            self._path(key).unlink()
