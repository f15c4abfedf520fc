"""A sample that is handed over: what its engine writes when it stops it, for the engine that expects it.

It lies behind the blocks in the sample's buffer (buffer.py), so that it is gone with it. Both engine cores reach it
without a message: the destination looks for it between two of its steps. Invariants: it is there whole or not at all
(its length, written last, says so); it is written once, by an engine that generates for the sample no more.
"""

from __future__ import annotations

import os
import struct

import msgspec

# Before the text: how long it is, 0 for as long as there is none.
_LENGTH = struct.Struct("<q")
# Of a token as msgpack writes it, at most; of the rest, with a generator's state (5 kB of a Mersenne twister on CPU).
_TOKEN_BYTES = 5
_REST_BYTES = 16384


class Handover(msgspec.Struct, frozen=True):
    """`tokens`: the whole response so far; the rest as in `Stopped` and `Progress` (engine/messages.py)."""

    tokens: list[int]
    computed: int
    blocks: int
    window: int | None = None
    generator: bytes | None = None


_DECODER = msgspec.msgpack.Decoder(Handover)


def room_bytes(tokens: int) -> int:
    """Bytes to keep for a handover of a sample that comes to have `tokens` tokens at most."""
    return _LENGTH.size + tokens * _TOKEN_BYTES + _REST_BYTES


def write(path: str, offset: int, handover: Handover) -> None:
    """Hand over. Raises OSError if the file is gone, or there is no room on its file system or in it."""
    text = msgspec.msgpack.encode(handover)
    descriptor = os.open(path, os.O_RDWR)
    try:
        if offset + _LENGTH.size + len(text) > os.fstat(descriptor).st_size:
            raise OSError(f"{path} has no room for a handover of {len(text)} bytes")
        os.pwrite(descriptor, text, offset + _LENGTH.size)
        os.pwrite(descriptor, _LENGTH.pack(len(text)), offset)
    finally:
        os.close(descriptor)


def read(path: str, offset: int) -> Handover | None:
    """Return what was handed over; None if nothing is, or the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, offset))
        return _DECODER.decode(os.pread(descriptor, length, offset + _LENGTH.size)) if length else None
    finally:
        os.close(descriptor)
