"""What is kept of one prompt's responses, and its form as bytes: in memory, in a journal and in a checkpoint.

An encoded record (integers little-endian): rollout id, sizes, the prompt key, the response lengths, earlier rollouts as
pairs of doubles (rollout id, median length), each piece's reward and sizes, and then all pieces' tokens, packed.

Arrays of 32-bit numbers are packed as planes: all lowest bytes, then all second bytes, and so on, then zlib. Token ids
and positions fill two or three of their four bytes; side by side, the empty ones all but vanish. Measured
(docs/benchmarks.md): zlib at its fastest with this makes less of them than zlib's default without, in a fraction of the
time. zstandard would be three to four times faster again for the same size: not worth a dependency to a thread that
nothing waits for.

Invariants:
- What was encoded comes back equal, whatever machine reads it.
- `read_head` does not decompress: whoever only needs to know whose record it is never pays for its tokens.
- Nothing handed in is referenced afterwards: a shared-memory buffer that tokens came in can be freed.
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


# Rollout id, and how many: bytes of the key, lengths, earlier rollouts, pieces, tokens, bytes of the packed tokens.
HEAD = struct.Struct("<qIIIIQQ")
PIECE = struct.Struct("<dII")
# The record of a prompt's earlier rollouts belongs to none: it is older than all of them.
NO_ROLLOUT = -1

# Earlier rollouts of a prompt: (rollout id, median response length), oldest first.
Earlier = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Record:
    """Responses of one prompt in one rollout.

    `rollout_id`: the training step they were generated in. `pieces`: what drafts may come from. `lengths`: response
    lengths in tokens, of all the samples, also of those without a piece. `earlier`: what is still known of rollouts
    that are not kept any more.
    """

    prompt_key: str
    rollout_id: int
    pieces: tuple[Piece, ...] = ()
    lengths: tuple[int, ...] = ()
    earlier: Earlier = ()


@dataclass(frozen=True)
class RecordHead:
    """A record without its tokens. `pieces` and `tokens` are how many there are, contexts included."""

    prompt_key: str
    rollout_id: int
    lengths: tuple[int, ...]
    earlier: Earlier
    pieces: int
    tokens: int


def encode(record: Record) -> bytes:
    """The record as bytes. Raises ValueError for token ids out of range or a negative length."""
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
    """Everything but the tokens."""
    rollout_id, key_bytes, lengths, earlier, pieces, tokens, _ = HEAD.unpack_from(encoded)
    at = HEAD.size + key_bytes
    key = encoded[HEAD.size : at].decode("utf-8")
    read = np.frombuffer(encoded, dtype="<i8", count=lengths, offset=at)
    pairs = np.frombuffer(encoded, dtype="<f8", count=2 * earlier, offset=at + read.nbytes).reshape(-1, 2)
    known = tuple((int(rollout), float(median)) for rollout, median in pairs)
    return RecordHead(key, rollout_id, tuple(read.tolist()), known, pieces, tokens)


def read_pieces(encoded: bytes) -> list[Piece]:
    """The pieces, with int32 arrays of their own."""
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
    """The record that was encoded."""
    head = read_head(encoded)
    return Record(head.prompt_key, head.rollout_id, tuple(read_pieces(encoded)), head.lengths, head.earlier)


def median_length(lengths: Sequence[int]) -> float:
    """Median of response lengths in tokens (RhymeRL, section 6.2: what prompts are ranked by)."""
    return float(np.median(np.asarray(lengths, dtype=np.float64)))
