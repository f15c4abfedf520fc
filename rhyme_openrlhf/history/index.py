"""The draft index of one prompt: finds what followed the same few tokens in the prompt's last rollout.

RhymeRL (section 5.3) keeps a suffix tree per prompt whose nodes carry a priority, the sum of the rewards below them.
This index is the same tree, held as a suffix array. A node is an interval of the sorted suffixes, its count is the
interval's length, and its priority is a difference of prefix sums. So the whole tree is a few flat arrays in one buffer
that is shared, memory-mapped or sent without any conversion.

The buffer, in this order (integers little-endian; n is the number of stored tokens, separators included; each array
begins at a multiple of 8 bytes):

    header    64 bytes: magic, format version, number of pieces, n, size of the buffer, the position in `tokens` where
              this run's own pieces begin, zeros, checksum
    rewards   int64[number of pieces]: the fixed-point rewards that occur, ascending, then zeros
    sums      int64[n / 32 + 1]: sums of the rewards of the first 0, 32, 64, ... suffixes in sorted order
    suffixes  int32[n]: where each suffix starts in `tokens`, in sorted order
    places    int32[n]: the place of each suffix in `suffixes`, in the order of `tokens`
    tokens    int32[n]: each piece's context and tokens, then its separator
    grades    uint16[n]: of each suffix, in sorted order, which of `rewards` is its piece's
    shared    uint8[n]: how many first tokens each suffix has in common with the one sorted before it; 255: or more

Invariants:
- A separator is a negative number that occurs once (-1 after the first piece, -2 after the second, ...). Tokens are
  never negative. So no match and no draft runs across two pieces, and no two suffixes are equal.
- A draft is a continuation that occurs in the history right after the matched tokens.
- At a branch, the child with the greatest (max(priority, 0), count, recency) is taken, compared in that order:
  `priority` is the sum of the rewards of the suffixes below the child; `count` is how many suffixes are below it;
  `recency` is the furthest position of one of them in `tokens`, so the piece given last wins, and within one piece
  the later occurrence. Priorities of zero and less are all equal: a sum of failures says how often a branch was
  taken, not that a rarer failure is likelier. Pieces that end at the branch take no part.
- Rewards are rounded to fixed point, and priorities are exact sums of these integers: the order of summation never
  decides a tie. Sums that are equal only before the rounding (0.6 - 0.3 and 0.3) may differ by one unit.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rhyme_openrlhf.drafting_core import core

Tokens = NDArray[np.integer[Any]] | Sequence[int]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

MAGIC = b"RHYMEIDX"
# 2: the checksum is XXH3 of 64 bits (1: CRC-32, which reads a buffer at a tenth of the speed). 3: places, and what
# neighbours share; rewards by grade (2: a prefix sum for each suffix, as many bytes as all that is new). 4: where this
# run's own pieces begin (3: zeros there, so all are its own).
VERSION, OLDEST_VERSION = 4, 3
HEADER = struct.Struct("<8sIIqq")
CHECKSUM = struct.Struct("<Q")
# A multiple of 8, so that the int64 array right behind the header is aligned; the rest is room for later versions.
HEADER_BYTES = 64
CHECKSUM_AT = HEADER_BYTES - CHECKSUM.size
# Prefix sums are int64: one bit is the sign, one is spare for the rounding of the largest reward.
PRIORITY_BITS = 62
MAX_TOKEN = 2**31 - 1
# Grades are uint16.
MAX_PIECES = 2**16


class IndexBufferError(ValueError):
    """A buffer is not a whole, intact draft index of this version; the message says what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One response of the prompt's last rollout.

    - `context`: the last tokens before the response (the end of the prompt), so that the start of a response is
      matched too. It has as many tokens as the longest prefix that is looked up.
    - `tokens`: the generated tokens. Both are token ids from 0 to 2**31 - 1.
    - `reward`: in any unit, because it is compared only with the rewards of the same index.
    """

    context: Tokens
    tokens: Tokens
    reward: float


@dataclass(frozen=True)
class Draft:
    """Tokens that followed in the history, and how many of the last tokens had to match to find them (0: no match).

    `confidence`: for each token, the estimated probability that the draft is right up to and including it.
    """

    tokens: list[int]
    match_length: int
    confidence: list[float] = field(default_factory=list, compare=False)


def build_index(pieces: Sequence[Piece], earlier: int = 0) -> NDArray[np.uint8]:
    """Build the draft index of `pieces` (RhymeRL, section 5.3), given oldest first, as one uint8 buffer.

    The first `earlier` pieces are of earlier runs; a draft that occurs in these alone says so.

    The buffer takes 15.25 bytes per token. Rewards that are not finite count as 0. Without pieces, the index never
    drafts. Raises ValueError for a token id that is no integer from 0 to 2**31 - 1, for 2**31 tokens and more, or for
    more than 65,536 pieces.
    """
    text, lengths = _join(pieces)
    if text.size > MAX_TOKEN:
        raise ValueError(f"a draft index holds at most {MAX_TOKEN} tokens, got {text.size}")
    if len(pieces) > MAX_PIECES:
        raise ValueError(f"a draft index holds at most {MAX_PIECES} responses, got {len(pieces)}")
    rewards = _fixed_point([piece.reward for piece in pieces], text.size)
    buffer: NDArray[np.uint8] = core.build(text, lengths, rewards, earlier)
    buffer[CHECKSUM_AT:HEADER_BYTES] = np.frombuffer(CHECKSUM.pack(_checksum(buffer)), dtype=np.uint8)
    return buffer


class DraftIndex:
    """A draft index opened for lookups. It holds views into its buffer and changes nothing, so threads may share it."""

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        """Use `from_buffer`, which checks the buffer first."""
        self.compiled = core.Index(buffer)
        """The compiled core's view of the buffer, which it keeps alive."""

    @classmethod
    def from_buffer(cls, buffer: Any) -> DraftIndex:
        """Open what `build_index` made: bytes, memoryview, np.ndarray, np.memmap or any other contiguous buffer.

        Zero-copy, except where the memory is not aligned to 8 bytes. The checksum is verified here, once; the caller
        must not change the buffer afterwards. Raises IndexBufferError.
        """
        try:
            raw = np.frombuffer(buffer, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise IndexBufferError(f"a draft index must be a contiguous, non-empty buffer: {error}") from error
        if raw.size < HEADER_BYTES:
            raise IndexBufferError(f"draft index is torn: {raw.size} bytes, its header alone has {HEADER_BYTES}")
        magic, version, _, _, size = HEADER.unpack_from(raw.data)
        if magic != MAGIC:
            raise IndexBufferError(f"not a draft index: it starts with {magic!r}, not with {MAGIC!r}")
        if not OLDEST_VERSION <= version <= VERSION:
            raise IndexBufferError(
                f"draft index has format version {version}, this code reads versions {OLDEST_VERSION} to {VERSION}"
            )
        if raw.size != size:
            raise IndexBufferError(f"draft index is torn: its header says {size} bytes, the buffer has {raw.size}")
        (expected,) = CHECKSUM.unpack_from(raw.data, CHECKSUM_AT)
        if _checksum(raw) != expected:
            raise IndexBufferError("draft index is corrupt: its checksum does not fit its content")
        if raw.ctypes.data % np.dtype(np.int64).itemsize:
            raw = raw.copy()
        try:
            return cls(raw)
        except core.BufferError as error:
            raise IndexBufferError(str(error)) from error

    def draft(self, context: Tokens, prefix_max: int, prefix_min: int, limit: int) -> Draft:
        """Return up to `limit` tokens that are likely to follow `context` (RhymeRL, sections 5.2 to 5.4).

        The longest end of `context`, from `prefix_max` down to `prefix_min` tokens, that occurs with a continuation is
        the match. Only the last `prefix_max` elements of `context` are read. From there the best child is
        taken at each branch (module docstring) until `limit` tokens are found or no stored response goes on.
        Negative ids in `context` (placeholders) match nothing. Raises ValueError unless 1 <= prefix_min <= prefix_max.
        """
        if not 1 <= prefix_min <= prefix_max:
            raise ValueError(f"need 1 <= prefix_min <= prefix_max, got {prefix_min} and {prefix_max}")
        if limit <= 0:
            return Draft([], 0)
        text = np.array(context[-prefix_max:], dtype=np.int32)
        tokens, confidence, matched = self.compiled.draft(text, prefix_max, prefix_min, limit)
        return Draft(tokens.tolist(), matched, confidence.tolist())


def _checksum(buffer: NDArray[np.uint8]) -> int:
    """Return XXH3, 64 bits, of everything but the checksum itself.

    The hash reads every byte, as a CRC would. It misses damage only by chance: one damaged buffer in 2**64.
    """
    hashed = xxhash.xxh3_64(buffer[:CHECKSUM_AT].data)
    hashed.update(buffer[HEADER_BYTES:].data)
    return hashed.intdigest()


def _join(pieces: Sequence[Piece]) -> tuple[Int32s, Int64s]:
    """Return all pieces in one array, each followed by its separator, and each piece's length with its separator."""
    parts: list[Int32s] = [np.empty(0, dtype=np.int32)]
    lengths = []
    for number, piece in enumerate(pieces):
        parts += [token_array(piece.context), token_array(piece.tokens), np.array([-1 - number], dtype=np.int32)]
        lengths.append(sum(part.size for part in parts[-3:]))
    return np.concatenate(parts), np.array(lengths, dtype=np.int64)


def token_array(tokens: Tokens) -> Int32s:
    """Return `tokens` as int32[n]. Raises ValueError for an id that is no integer from 0 to 2**31 - 1."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a flat sequence of integers, got {array.ndim} dimensions of {array.dtype}")
    if array.min() < 0 or array.max() > MAX_TOKEN:
        raise ValueError(f"token ids must be from 0 to {MAX_TOKEN}, got {array.min()} to {array.max()}")
    return array.astype(np.int32, copy=False)


def _fixed_point(rewards: Sequence[float], count: int) -> Int64s:
    """Return rewards as integers, in a unit chosen so that `count` times the largest still fits a prefix sum.

    The unit is a power of two, at most 2**-30 of the largest reward for the 2**31 suffixes that an index can hold.
    """
    finite = [reward if math.isfinite(reward) else 0.0 for reward in rewards]
    _, exponent = math.frexp(max(map(abs, finite), default=0.0))
    shift = PRIORITY_BITS - count.bit_length() - exponent
    return np.array([round(math.ldexp(reward, shift)) for reward in finite], dtype=np.int64)
