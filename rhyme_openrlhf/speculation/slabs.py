"""Memory of many arrays that come and go, on few large pages.

A decode step touches a few lines of hundreds of small arrays. With each on a page of its own, finding the pages takes
as long as reading the lines; so arrays are cut from slabs that are large enough for the kernel's huge pages (NumPy asks
for them). The first write to a huge page makes the kernel find and zero one, which was seen to take 5 ms in a virtual
machine: so a slab is written to before it is needed, by a thread of its own.

Invariants: an array is whole cache lines; what was given back is cut again for the same size only (there are few
sizes, because all arrays here double); the caller gives back what nobody reads any more.
"""

from __future__ import annotations

import _thread
from collections import defaultdict
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.speculation.shared_words import write_same

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 4240535419

Bytes = NDArray[np.uint8]

# Two huge pages and more, wherever it begins. What is larger gets memory of its own.
SLAB_BYTES = 8 << 20
LINE_BYTES = 64
PAGE_BYTES = 4096


class Slabs:
    """Cuts arrays from slabs. One caller at a time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)
        self._rest: Bytes = np.empty(0, dtype=np.uint8)
        # The slab after this one; none until half of this one is cut.
        self._next: Bytes | None = None

    def take(self, kind: type[np.generic], count: int) -> NDArray[Any]:
        """`count` elements, whole cache lines, with any content."""
        nbytes = count * np.dtype(kind).itemsize
        assert nbytes % LINE_BYTES == 0
        free = self._free[nbytes]
        if free:
            return free.pop().view(kind)
        if nbytes > SLAB_BYTES // 2:
            return aligned(nbytes).view(kind)
        if nbytes > self._rest.size:
            self._rest, self._next = aligned(SLAB_BYTES) if self._next is None else self._next, None
        found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        if self._next is None and self._rest.size < SLAB_BYTES // 2:
            self._next = aligned(SLAB_BYTES)
            # Unlike `threading.Thread.start`, this does not wait for the thread to run.
            _thread.start_new_thread(have_pages, (self._next,))
        return found.view(kind)

    def give(self, array: NDArray[Any]) -> None:
        """Back what `take` gave."""
        if array.nbytes <= SLAB_BYTES // 2:
            self._free[array.nbytes].append(array.view(np.uint8))


def aligned(nbytes: int) -> Bytes:
    """So many bytes, from the beginning of a cache line on."""
    room = np.empty(nbytes + LINE_BYTES, dtype=np.uint8)
    begin = -room.ctypes.data % LINE_BYTES
    return room[begin : begin + nbytes]


@njit(cache=True, nogil=True)
def have_pages(memory: Bytes) -> None:
    """Make the kernel find pages for all of it; what is in it stays, also what others write meanwhile."""
    for begin in range(0, memory.size, PAGE_BYTES):
        write_same(memory.ctypes.data + begin)
