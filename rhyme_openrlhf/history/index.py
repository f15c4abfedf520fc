"""The draft index of one prompt: finds what followed the same few tokens in the prompt's last rollout.

RhymeRL (section 5.3) keeps a suffix tree per prompt whose nodes carry a priority, the sum of the rewards below them.
This is the same tree held as a suffix array: a node is an interval of the sorted suffixes, its count is the
interval's length, and its priority is the difference of two prefix sums. So the whole tree is three flat arrays in
one buffer that is shared, memory-mapped or sent without any conversion.

The buffer, in this order (integers little-endian; n is the number of stored tokens, separators included):

    header           64 bytes: magic, format version, number of pieces, n, size of the buffer, zeros, checksum
    prefix_sums      int64[n + 1]: sum of the fixed-point rewards of the first i suffixes in sorted order
    suffixes         int32[n]: where each suffix starts in `tokens`, in sorted order
    tokens           int32[n]: each piece's context and tokens, then its separator

Invariants:
- A separator is a negative number that occurs once (-1 after the first piece, -2 after the second, ...). Tokens are
  never negative. So no match and no draft runs across two pieces, and no two suffixes are equal.
- A draft is a continuation that occurs in the history right after the matched tokens.
- At a branch, the child with the greatest (max(priority, 0), count, recency) is taken, compared in that order:
  `priority` is the sum of the rewards of the suffixes below the child; `count` is how many suffixes are below it;
  `recency` is the furthest position of one of them in `tokens`, so the piece given last wins, and within one piece
  the later occurrence. Priorities of zero and less are all equal: a sum of failures says how often a branch was
  taken, not that a rarer failure is likelier. Pieces that end at the branch take no part.
- Priorities are sums of integers (fixed point), so equal sums are exactly equal and a tie never depends on rounding.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]] | Sequence[int]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

MAGIC = b"RHYMEIDX"
VERSION = 1
HEADER = struct.Struct("<8sIIqq")
CHECKSUM = struct.Struct("<I")
# A multiple of 8, so that the int64 array right behind the header is aligned; the rest is room for later versions.
HEADER_BYTES = 64
CHECKSUM_AT = HEADER_BYTES - CHECKSUM.size
# Prefix sums are int64: one bit is the sign, one is spare for the rounding of the largest reward.
PRIORITY_BITS = 62
# Radix keys are int64 and must not be negative.
KEY_BITS = 63
MAX_TOKEN = 2**31 - 1


class IndexBufferError(ValueError):
    """A buffer is not a whole, intact draft index of this version; the message says what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One response of the prompt's last rollout.

    `context`: the last tokens before the response (the end of the prompt), so that the start of a response is matched
    too; as many as the longest prefix that is looked up. `tokens`: the generated tokens. Both are token ids from 0 to
    2**31 - 1. `reward`: any unit; only compared with the rewards of the same index.
    """

    context: Tokens
    tokens: Tokens
    reward: float


@dataclass(frozen=True)
class Draft:
    """Tokens that followed in the history, and how many of the last tokens had to match to find them (0: no match)."""

    tokens: list[int]
    match_length: int


def build_index(pieces: Sequence[Piece]) -> NDArray[np.uint8]:
    """The draft index of `pieces` (RhymeRL, section 5.3), oldest first, as one uint8 buffer.

    16 bytes per token. Rewards that are not finite count as 0. No pieces make an index that never drafts. Raises
    ValueError for a token id that is no integer from 0 to 2**31 - 1, or for 2**31 tokens and more.
    """
    text, owners = _join(pieces)
    count = text.size
    if count > MAX_TOKEN:
        raise ValueError(f"a draft index holds at most {MAX_TOKEN} tokens, got {count}")
    size = _size(count)
    buffer = np.zeros(size, dtype=np.uint8)
    prefix_sums, suffixes, tokens = _arrays(buffer, count)
    tokens[:] = text
    suffixes[:] = _suffix_array(text)
    weights = _fixed_point([piece.reward for piece in pieces], count)
    np.cumsum(weights[owners[suffixes]], out=prefix_sums[1:])
    buffer[: HEADER.size] = np.frombuffer(HEADER.pack(MAGIC, VERSION, len(pieces), count, size), dtype=np.uint8)
    buffer[CHECKSUM_AT:HEADER_BYTES] = np.frombuffer(CHECKSUM.pack(_checksum(buffer)), dtype=np.uint8)
    return buffer


class DraftIndex:
    """A draft index opened for lookups. Holds views into its buffer and changes nothing: safe to use from threads."""

    def __init__(self, buffer: NDArray[np.uint8], count: int) -> None:
        """Use `from_buffer`, which checks the buffer first. `count`: stored tokens, separators included."""
        self._prefix_sums, self._suffixes, self._tokens = _arrays(buffer, count)
        for array in (self._prefix_sums, self._suffixes, self._tokens):
            # Always read-only: a buffer from Ray's object store is, and the lookup is compiled once per array type.
            array.flags.writeable = False

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
        magic, version, _, count, size = HEADER.unpack_from(raw.data)
        if magic != MAGIC:
            raise IndexBufferError(f"not a draft index: it starts with {magic!r}, not with {MAGIC!r}")
        if version != VERSION:
            raise IndexBufferError(f"draft index has format version {version}, this code reads version {VERSION}")
        if raw.size != size:
            raise IndexBufferError(f"draft index is torn: its header says {size} bytes, the buffer has {raw.size}")
        (expected,) = CHECKSUM.unpack_from(raw.data, CHECKSUM_AT)
        if _checksum(raw) != expected or _size(count) != size:
            raise IndexBufferError("draft index is corrupt: its checksum does not fit its content")
        if raw.ctypes.data % np.dtype(np.int64).itemsize:
            raw = raw.copy()
        return cls(raw, count)

    def draft(self, context: Tokens, prefix_max: int, prefix_min: int, limit: int) -> Draft:
        """Up to `limit` tokens that are likely to follow `context` (RhymeRL, sections 5.2 to 5.4).

        The longest end of `context`, from `prefix_max` down to `prefix_min` tokens, that occurs with a continuation is
        the match; only the last `prefix_max` elements of `context` are read. From there the best child is
        taken at each branch (module docstring) until `limit` tokens are found or no stored response goes on.
        Negative ids in `context` (placeholders) match nothing. Raises ValueError unless 1 <= prefix_min <= prefix_max.
        """
        if not 1 <= prefix_min <= prefix_max:
            raise ValueError(f"need 1 <= prefix_min <= prefix_max, got {prefix_min} and {prefix_max}")
        if limit <= 0:
            return Draft([], 0)
        pattern = np.array(context[-prefix_max:], dtype=np.int64)
        out = np.empty(limit, dtype=np.int32)
        found, matched = _draft(self._tokens, self._suffixes, self._prefix_sums, pattern, prefix_min, out)
        return Draft(out[:found].tolist(), matched)


def compile_lookup() -> None:
    """Compile build and lookup, or load them from Numba's cache: seconds that no decode step should have to wait."""
    index = DraftIndex.from_buffer(build_index([Piece([0, 1], [2], 1.0)]))
    index.draft([0, 1], 2, 1, 1)


def _size(count: int) -> int:
    return HEADER_BYTES + 8 * (count + 1) + 4 * count + 4 * count


def _arrays(buffer: NDArray[np.uint8], count: int) -> tuple[Int64s, Int32s, Int32s]:
    """Views of the prefix sums, the suffixes and the tokens inside `buffer`."""
    sums_end = HEADER_BYTES + 8 * (count + 1)
    suffixes_end = sums_end + 4 * count
    return (
        buffer[HEADER_BYTES:sums_end].view(np.int64),
        buffer[sums_end:suffixes_end].view(np.int32),
        buffer[suffixes_end:].view(np.int32),
    )


def _checksum(buffer: NDArray[np.uint8]) -> int:
    """CRC-32 of everything but the checksum itself."""
    return zlib.crc32(buffer[HEADER_BYTES:].data, zlib.crc32(buffer[:CHECKSUM_AT].data))


def _join(pieces: Sequence[Piece]) -> tuple[Int32s, Int32s]:
    """All pieces in one array, each followed by its separator; and which piece each element belongs to."""
    parts: list[Int32s] = []
    lengths = []
    for number, piece in enumerate(pieces):
        parts += [token_array(piece.context), token_array(piece.tokens), np.array([-1 - number], dtype=np.int32)]
        lengths.append(sum(part.size for part in parts[-3:]))
    if not parts:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
    return np.concatenate(parts), np.repeat(np.arange(len(pieces), dtype=np.int32), lengths)


def token_array(tokens: Tokens) -> Int32s:
    """`tokens` as int32[n]. Raises ValueError for an id that is no integer from 0 to 2**31 - 1."""
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a flat sequence of integers, got {array.ndim} dimensions of {array.dtype}")
    if array.min() < 0 or array.max() > MAX_TOKEN:
        raise ValueError(f"token ids must be from 0 to {MAX_TOKEN}, got {array.min()} to {array.max()}")
    return array.astype(np.int32, copy=False)


def _fixed_point(rewards: Sequence[float], count: int) -> Int64s:
    """Rewards as integers in a unit of their own, so small that `count` of the largest still fit a prefix sum.

    The unit is a power of two, at most 2**-30 of the largest reward for the 2**31 suffixes that an index can hold.
    """
    finite = [reward if math.isfinite(reward) else 0.0 for reward in rewards]
    _, exponent = math.frexp(max(map(abs, finite), default=0.0))
    shift = PRIORITY_BITS - count.bit_length() - exponent
    return np.array([round(math.ldexp(reward, shift)) for reward in finite], dtype=np.int64)


def _suffix_array(text: Int32s) -> Int32s:
    """Start positions of the suffixes of `text` in lexicographic order, int32[n].

    Prefix doubling (Manber and Myers 1993), O(n log n) even where the text only repeats itself. The first round
    sorts by as many tokens as fit one 64-bit key, which spares the rounds for 1, 2 and often 4 tokens.
    """
    if text.size == 0:
        return np.empty(0, dtype=np.int32)
    values, dense = np.unique(text, return_inverse=True)
    bits = values.size.bit_length()
    width = min(KEY_BITS // bits, text.size)
    keys = np.zeros(text.size, dtype=np.int64)
    for offset in range(width):
        keys <<= bits
        keys[: text.size - offset] |= dense[offset:] + 1  # 0 stays for: the text has ended
    order = np.argsort(keys).astype(np.int32)
    ordered = keys[order]
    heads = np.zeros(text.size, dtype=np.int32)
    heads[1:] = np.where(ordered[1:] != ordered[:-1], np.arange(1, text.size), 0)
    ranks = np.empty(text.size, dtype=np.int32)
    ranks[order] = np.maximum.accumulate(heads)
    _refine(order, ranks, width)
    return order


@njit(cache=True, nogil=True)
def _refine(order: Int32s, ranks: Int32s, width: int) -> None:
    """Sort `order` in place from "by the first `width` tokens" to "by all tokens".

    `ranks[i]`: where the group of suffixes that equal suffix i so far begins in `order`. Overwritten.
    """
    count = order.size
    by_second = np.empty(count, dtype=np.int32)
    new_ranks = np.empty(count, dtype=np.int32)
    free = np.empty(count, dtype=np.int32)
    while True:
        # All suffixes in the order of what follows their first `width` tokens: `order` itself, moved by `width`.
        filled = 0
        for suffix in range(count - width, count):
            by_second[filled] = suffix
            filled += 1
        for place in range(count):
            free[place] = place
            if order[place] >= width:
                by_second[filled] = order[place] - width
                filled += 1
        for place in range(count):
            suffix = by_second[place]
            group = ranks[suffix]
            order[free[group]] = suffix
            free[group] += 1
        head = 0
        groups = 1
        new_ranks[order[0]] = 0
        for place in range(1, count):
            before, suffix = order[place - 1], order[place]
            # Two of one group have `width` equal tokens, none of them a separator: so both go on behind them.
            if ranks[before] != ranks[suffix] or ranks[before + width] != ranks[suffix + width]:
                head = place
                groups += 1
            new_ranks[suffix] = head
        if groups == count:
            return
        ranks, new_ranks = new_ranks, ranks
        width *= 2


@njit(cache=True, nogil=True)
def _draft(
    tokens: Int32s, suffixes: Int32s, prefix_sums: Int64s, pattern: Int64s, prefix_min: int, out: Int32s
) -> tuple[int, int]:
    """Fill `out` with the draft for `pattern`; returns (tokens found, tokens matched), both 0 without a match."""
    usable = 0
    while usable < pattern.size and pattern[pattern.size - 1 - usable] >= 0:
        usable += 1
    # Whatever follows a longer match follows its end too: so the longest is found by bisection, beginning with the
    # shortest, because often there is none at all.
    best, best_low, best_high = 0, 0, 0
    length, shortest, longest = prefix_min, prefix_min, usable
    while shortest <= longest:
        low, high = _match(tokens, suffixes, pattern[pattern.size - length :])
        # Separators sort first: if the last suffix goes on with one, all of them do.
        if low < high and tokens[suffixes[high - 1] + length] >= 0:
            best, best_low, best_high = length, low, high
            shortest = length + 1
        elif not best:
            return 0, 0
        else:
            longest = length - 1
        length = (shortest + longest + 1) >> 1
    if not best:
        return 0, 0
    return _walk(tokens, suffixes, prefix_sums, best_low, best_high, best, out), best


@njit(cache=True, nogil=True)
def _match(tokens: Int32s, suffixes: Int32s, pattern: Int64s) -> tuple[int, int]:
    """The interval [low, high) of the suffixes that begin with `pattern`; low == high where none does."""
    low, high = 0, suffixes.size
    for depth in range(pattern.size):
        low = _first_at_least(tokens, suffixes, low, high, depth, pattern[depth])
        if low == high or tokens[suffixes[low] + depth] != pattern[depth]:
            return low, low
        high = _child_end(tokens, suffixes, low, high, depth)
    return low, high


@njit(cache=True, nogil=True)
def _walk(tokens: Int32s, suffixes: Int32s, prefix_sums: Int64s, low: int, high: int, depth: int, out: Int32s) -> int:
    """Follow the best child from the node [low, high) at `depth` tokens; returns how many of `out` were filled."""
    found = 0
    while found < out.size:
        last = tokens[suffixes[high - 1] + depth]
        if last < 0:
            break
        if tokens[suffixes[low] + depth] != last:
            low, high = _best_child(tokens, suffixes, prefix_sums, low, high, depth)
        out[found] = tokens[suffixes[low] + depth]
        found += 1
        depth += 1
    return found


@njit(cache=True, nogil=True)
def _best_child(
    tokens: Int32s, suffixes: Int32s, prefix_sums: Int64s, low: int, high: int, depth: int
) -> tuple[int, int]:
    """The child interval with the greatest (max(priority, 0), count, recency), see the module docstring."""
    start = _first_at_least(tokens, suffixes, low, high, depth, 0)
    best_start, best_end, best_priority = start, start, -1
    while start < high:
        end = _child_end(tokens, suffixes, start, high, depth)
        priority = max(prefix_sums[end] - prefix_sums[start], 0)
        better = priority > best_priority
        if priority == best_priority:
            gain = (end - start) - (best_end - best_start)
            better = gain > 0
            if gain == 0:
                # Rare enough that scanning the two intervals is cheaper than keeping range maxima for all of them.
                better = suffixes[start:end].max() > suffixes[best_start:best_end].max()
        if better:
            best_start, best_end, best_priority = start, end, priority
        start = end
    return best_start, best_end


@njit(cache=True, nogil=True)
def _first_at_least(tokens: Int32s, suffixes: Int32s, low: int, high: int, depth: int, token: int) -> int:
    """First place in [low, high) whose token at `depth` is at least `token`; `high` if there is none."""
    while low < high:
        middle = (low + high) >> 1
        if tokens[suffixes[middle] + depth] < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _child_end(tokens: Int32s, suffixes: Int32s, low: int, high: int, depth: int) -> int:
    """End of the child that begins at `low`: doubling steps, then bisection, as most children are small."""
    token = tokens[suffixes[low] + depth]
    step = 1
    while low + step < high and tokens[suffixes[low + step] + depth] == token:
        low += step
        step *= 2
    return _first_at_least(tokens, suffixes, low + 1, min(low + step, high), depth, token + 1)
