"""Search for a text in a log of any size, one part after the other.

Invariants: a request reads at most `MAX_SCAN` bytes. Matches are in file order, at most one per line. The response says
how far the search went.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from rhyme_openrlhf.api.store.bounds import View

# Longest search text.
SEARCH_LENGTH = 500
# Read and compared within a quarter of a second.
MAX_SCAN = 64 * 1024 * 1024
# Most matches per response; the next request continues from `scanned_to`.
MAX_MATCHES = 500
# Bytes of a line that a list shows.
LINE_BYTES = 300
_BLOCK = 1024 * 1024
# Longer lines are searched in pieces.
_LONGEST_LINE = 8 * _BLOCK


class LogMatch(View):
    """A matching line: the byte where it starts, and its beginning."""

    start: int
    text: str


class LogMatches(View):
    """Matching lines, up to byte `scanned_to` of `size`."""

    items: list[LogMatch]
    scanned_to: int
    size: int


def search(file: BinaryIO, text: str, start: int) -> LogMatches:
    """Find lines from byte `start` (a line's start) on that contain `text`; ASCII letters match in any case."""
    wanted = text.encode().lower()
    size = os.fstat(file.fileno()).st_size
    file.seek(min(start, size))
    position = file.tell()
    end = min(size, position + MAX_SCAN)
    found: list[LogMatch] = []
    rest = b""
    following = position
    while position < end and len(found) < MAX_MATCHES:
        block = file.read(min(_BLOCK, end - position))
        if not block:  # the file was truncated meanwhile
            break
        base, data = position - len(rest), rest + block
        position += len(block)
        # Only complete lines; the rest is searched with the next block or the next request.
        cut = len(data) if position >= size or len(data) > _LONGEST_LINE else data.rfind(b"\n") + 1
        following = base + _matches(data[:cut], base, wanted, found)
        rest = data[cut:]
    return LogMatches(items=found, scanned_to=following, size=size)


def _matches(data: bytes, base: int, wanted: bytes, found: list[LogMatch]) -> int:
    """Add matches to `found`, up to MAX_MATCHES; return how much of `data` was searched."""
    lowered = data.lower()
    looked = 0
    while (at := lowered.find(wanted, looked)) >= 0:
        begin = data.rfind(b"\n", 0, at) + 1
        stop = data.find(b"\n", at)
        stop = len(data) if stop < 0 else stop
        shown = data[begin : min(stop, begin + LINE_BYTES)].decode("utf-8", "replace")
        found.append(LogMatch(start=base + begin, text=shown))
        looked = min(stop + 1, len(data))
        if len(found) >= MAX_MATCHES:
            return looked
    return len(data)
