"""Arrays of 32-bit numbers as few bytes: all lowest bytes, then all second bytes, and so on, then zlib.

Token ids and positions fill two or three of their four bytes; side by side, the empty ones all but vanish. Measured
(docs/benchmarks.md): zlib at its fastest with this makes less of them than zlib's default without, in a fraction of the
time. zstandard would be three to four times faster again for the same size: not worth a dependency to a thread that
nothing waits for.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

LEVEL = 1
WORD = 4


def packed(content: NDArray[np.uint8]) -> bytes:
    """`content` compressed; any length, best for little-endian 32-bit numbers."""
    whole = content.size // WORD * WORD
    planes = np.ascontiguousarray(content[:whole].reshape(-1, WORD).T)
    compressor = zlib.compressobj(LEVEL)
    return compressor.compress(planes.data) + compressor.compress(content[whole:].tobytes()) + compressor.flush()


def unpacked(block: bytes, nbytes: int) -> NDArray[np.uint8]:
    """What `packed` was given, `nbytes` bytes. Raises ValueError if `block` is anything else."""
    try:
        raw = zlib.decompress(block, bufsize=max(1, nbytes))
    except zlib.error as error:
        raise ValueError(f"a compressed block is damaged: {error}") from error
    if len(raw) != nbytes:
        raise ValueError(f"a compressed block holds {len(raw)} bytes, not {nbytes}")
    found = np.empty(nbytes, dtype=np.uint8)
    whole = nbytes // WORD * WORD
    planes = np.frombuffer(raw, dtype=np.uint8)
    found[:whole].reshape(-1, WORD)[...] = planes[:whole].reshape(WORD, -1).T
    found[whole:] = planes[whole:]
    return found
