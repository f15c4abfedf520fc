"""Finding a text in a log, however large it is, a stretch at a time.

Invariants: no more than `MAX_SCAN` bytes are read for one question; what was found is in the order of the file, a line
once; the answer says how far was looked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import BinaryIO

# Of a text; nobody types more.
SEARCH_LENGTH = 500
# Read and compared within a quarter of a second.
MAX_SCAN = 64 * 1024 * 1024
# A page's list; who wants more goes on from `scanned_to`.
MAX_MATCHES = 500
# What a list shows of a line.
LINE_BYTES = 300
_BLOCK = 1024 * 1024
# A longer line is looked at in pieces.
_LONGEST_LINE = 8 * _BLOCK


@dataclass(frozen=True)
class Match:
    """A line with the text: the byte where it starts, and its first `LINE_BYTES` bytes as text."""

    start: int
    text: str


@dataclass(frozen=True)
class Matches:
    """What was found from the first byte asked for up to `scanned_to`, of `size` bytes."""

    items: list[Match]
    scanned_to: int
    size: int


def search(file: BinaryIO, text: str, start: int) -> Matches:
    """Lines from byte `start` (a line's start) on that have `text`; letters of ASCII match in any case."""
    wanted = text.encode().lower()
    size = os.fstat(file.fileno()).st_size
    file.seek(min(start, size))
    position = file.tell()
    end = min(size, position + MAX_SCAN)
    found: list[Match] = []
    rest = b""
    following = position
    while position < end and len(found) < MAX_MATCHES:
        block = file.read(min(_BLOCK, end - position))
        if not block:  # it was cut short meanwhile
            break
        base, data = position - len(rest), rest + block
        position += len(block)
        # Only whole lines; what follows the last line's end is looked at with the next block, or the next question.
        cut = len(data) if position >= size or len(data) > _LONGEST_LINE else data.rfind(b"\n") + 1
        following = base + _matches(data[:cut], base, wanted, found)
        rest = data[cut:]
    return Matches(found, following, size)


def _matches(data: bytes, base: int, wanted: bytes, found: list[Match]) -> int:
    """Adds to `found`, at most up to MAX_MATCHES; returns how much of `data` was looked at."""
    lowered = data.lower()
    looked = 0
    while (at := lowered.find(wanted, looked)) >= 0:
        begin = data.rfind(b"\n", 0, at) + 1
        stop = data.find(b"\n", at)
        stop = len(data) if stop < 0 else stop
        found.append(Match(base + begin, data[begin : min(stop, begin + LINE_BYTES)].decode("utf-8", "replace")))
        looked = min(stop + 1, len(data))
        if len(found) >= MAX_MATCHES:
            return looked
    return len(data)
