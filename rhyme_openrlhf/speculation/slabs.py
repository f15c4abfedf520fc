"""Memory of many arrays that come and go, on few large pages.

A decode step touches a few lines of hundreds of small arrays. With each on a page of its own, finding the pages takes
as long as reading the lines; so arrays are cut from slabs that are large enough for the kernel's huge pages (NumPy asks
for them).

Invariants: an array is whole cache lines; what was given back is cut again for the same size only (there are few
sizes, because all arrays here double); the caller gives back what nobody reads any more.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Two huge pages and more, wherever it begins. What is larger gets memory of its own.
SLAB_BYTES = 8 << 20
LINE_BYTES = 64


class Slabs:
    """Cuts arrays from slabs. One caller at a time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)
        self._rest: Bytes = np.empty(0, dtype=np.uint8)

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
            self._rest = aligned(SLAB_BYTES)
        found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
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
