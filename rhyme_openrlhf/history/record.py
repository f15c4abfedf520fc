"""The record of one prompt's responses, and its form as bytes: in memory, in a journal and in a checkpoint.

An encoded record holds, in this order (integers little-endian):
- rollout id and sizes;
- the prompt key;
- the response lengths;
- earlier rollouts as pairs of doubles (rollout id, median length);
- each piece's reward and sizes;
- all pieces' tokens, packed.

Arrays of 32-bit numbers are packed as planes (all lowest bytes, then all second bytes, and so on) and then compressed
with zlib. Token ids and positions fill two or three of their four bytes. Placed side by side, the empty bytes compress
to almost nothing. Measured (docs/measurements/history.md): planes with zlib at its fastest are smaller than zlib's
default without planes, in a fraction of the time. zstandard would be three to four times faster again for the same
size. That is not worth a dependency, because nothing waits for the thread that packs.

Invariants:
- A decoded record equals the encoded one, on every machine that reads it.
- `read_head` does not decompress, so a caller that only needs the record's prompt never pays for its tokens.
- No argument is referenced after the call, so a shared-memory buffer that held the tokens can be freed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.history.index import Piece, token_array

LEVEL = 1
# The most that zlib makes of a byte.
MOST_RATIO = 1032
WORD = 4


def packed(content: NDArray[np.uint8]) -> bytes:
    """Return `content`, of any length, compressed; best for little-endian 32-bit numbers."""
    whole = content.size // WORD * WORD
    planes = np.ascontiguousarray(content[:whole].reshape(-1, WORD).T)
    compressor = zlib.compressobj(LEVEL)
    return compressor.compress(planes.data) + compressor.compress(content[whole:].tobytes()) + compressor.flush()


def unpacked(block: bytes, nbytes: int) -> NDArray[np.uint8]:
    """Return the `nbytes` bytes that `packed` made `block` from. Raises ValueError if `block` is anything else."""
    if nbytes > MOST_RATIO * len(block):
        raise ValueError(f"a compressed block of {len(block)} bytes cannot hold {nbytes}")
    decompressor = zlib.decompressobj()
    try:
        # One byte more than it should hold shows that it holds more.
        raw = decompressor.decompress(block, nbytes + 1)
    except zlib.error as error:
        raise ValueError(f"a compressed block is damaged: {error}") from error
    if len(raw) != nbytes or not decompressor.eof:
        raise ValueError(f"a compressed block holds {len(raw)} bytes, not {nbytes}")
    found = np.empty(nbytes, dtype=np.uint8)
    whole = nbytes // WORD * WORD
    planes = np.frombuffer(raw, dtype=np.uint8)
    found[:whole].reshape(-1, WORD)[...] = planes[:whole].reshape(WORD, -1).T
    found[whole:] = planes[whole:]
    return found


# Rollout id, then the numbers of: bytes of the key, lengths, earlier rollouts, pieces, tokens, bytes of packed tokens.
HEAD = struct.Struct("<qIIIIQQ")
PIECE = struct.Struct("<dII")
# Rollout id of the record of a prompt's earlier rollouts, which belongs to no single rollout: older than all of them.
NO_ROLLOUT = -1

# Earlier rollouts of a prompt: (rollout id, median response length), oldest first.
Earlier = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Record:
    """Responses of one prompt in one rollout.

    - `rollout_id`: the training step they were generated in.
    - `pieces`: the responses that drafts may come from.
    - `lengths`: response lengths in tokens, of all the samples, also of those without a piece.
    - `earlier`: rollout ids and median lengths of rollouts that are no longer kept.
    """

    prompt_key: str
    rollout_id: int
    pieces: tuple[Piece, ...] = ()
    lengths: tuple[int, ...] = ()
    earlier: Earlier = ()


@dataclass(frozen=True)
class RecordHead:
    """A record without its tokens. `pieces` and `tokens` are their numbers, contexts included."""

    prompt_key: str
    rollout_id: int
    lengths: tuple[int, ...]
    earlier: Earlier
    pieces: int
    tokens: int


def encode(record: Record) -> bytes:
    """Return the record as bytes. Raises ValueError for token ids out of range or a negative length."""
    if min(record.lengths, default=0) < 0:
        raise ValueError(f"response lengths must not be negative, got {min(record.lengths)}")
    key = record.prompt_key.encode("utf-8")
    sizes = []
    parts: list[np.ndarray] = []
    for piece in record.pieces:
        context, tokens = token_array(piece.context), token_array(piece.tokens)
        sizes.append(PIECE.pack(piece.reward, context.size, tokens.size))
        parts += [context, tokens]
    tokens = np.concatenate(parts).astype("<i4", copy=False) if parts else np.empty(0, dtype="<i4")
    block = packed(tokens.view(np.uint8))
    head = HEAD.pack(
        record.rollout_id,
        len(key),
        len(record.lengths),
        len(record.earlier),
        len(record.pieces),
        tokens.size,
        len(block),
    )
    lengths = np.asarray(record.lengths, dtype="<i8").tobytes()
    earlier = np.asarray(record.earlier, dtype="<f8").tobytes()
    return b"".join([head, key, lengths, earlier, *sizes, block])


def read_head(encoded: bytes) -> RecordHead:
    """Return everything but the tokens."""
    rollout_id, key_bytes, lengths, earlier, pieces, tokens, _ = HEAD.unpack_from(encoded)
    at = HEAD.size + key_bytes
    key = encoded[HEAD.size : at].decode("utf-8")
    read = np.frombuffer(encoded, dtype="<i8", count=lengths, offset=at)
    pairs = np.frombuffer(encoded, dtype="<f8", count=2 * earlier, offset=at + read.nbytes).reshape(-1, 2)
    known = tuple((int(rollout), float(median)) for rollout, median in pairs)
    return RecordHead(key, rollout_id, tuple(read.tolist()), known, pieces, tokens)


def read_pieces(encoded: bytes) -> list[Piece]:
    """Return the pieces, with int32 arrays of their own."""
    _, key_bytes, lengths, earlier, pieces, count, block = HEAD.unpack_from(encoded)
    at = HEAD.size + key_bytes + 8 * lengths + 16 * earlier
    tokens = unpacked(encoded[len(encoded) - block :], 4 * count).view("<i4").astype(np.int32, copy=False)
    found = []
    begin = 0
    for reward, context, length in PIECE.iter_unpack(encoded[at : at + PIECE.size * pieces]):
        middle, end = begin + context, begin + context + length
        found.append(Piece(tokens[begin:middle], tokens[middle:end], reward))
        begin = end
    return found


def decode(encoded: bytes) -> Record:
    """Return the record that was encoded."""
    head = read_head(encoded)
    return Record(head.prompt_key, head.rollout_id, tuple(read_pieces(encoded)), head.lengths, head.earlier)


def median_length(lengths: Sequence[int]) -> float:
    """Return the median of response lengths in tokens (RhymeRL, section 6.2, ranks prompts by it)."""
    return float(np.median(np.asarray(lengths, dtype=np.float64)))
