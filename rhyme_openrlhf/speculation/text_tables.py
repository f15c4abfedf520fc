"""Where the same few tokens occurred before, in a sample's own text and in its siblings' texts.

Siblings and own text are found through hash tables of where the same `shortest` tokens ended before, and a match is
then followed from step to step, so that it may be any number of tokens long.

Invariants: a token costs the same however many there are; a table slot that other tokens took over loses a match and
never gives a wrong one, because every match is compared with the texts; a sibling's draft ends where the sibling is.

A prompt's table that is crowded gets no more entries: a larger one does, and both are asked. So no step ever enters
again what was entered before. With TABLES of them the oldest is dropped.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int32_of, int32s_at, int64_of, prefetch, put_int32, put_int64
from rhyme_openrlhf.speculation.likely_next import SLOTS, slot_of
from rhyme_openrlhf.speculation.rows import (
    COUNT,
    FOLLOWED,
    HASH,
    OWN_AT,
    OWN_SLOTS,
    OWN_TABLE,
    SIBLING,
    SIBLING_AT,
    SIBLING_LENGTH,
    TABLE,
    TABLE_BUCKETS,
    TABLE_COLUMNS,
    TABLE_ENTERED,
    TABLES,
    TEXT,
    VOTES,
)

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 3501226979

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Hashes = NDArray[np.uint64]

# How far back a new match is measured. Longer ones are all the same: certain enough.
LONGEST_MEASURED = 32
# An entry of the siblings' table, from the lowest bit on: the number of the sample's tokens up to the entry's end; the
# sample's row + 1; and a mark of the tokens, so that most entries of other tokens are known without reading texts.
ROW_SHIFT, MARK_SHIFT = 32, 52
MARK_BITS = 11
POSITION_MASK = (1 << ROW_SHIFT) - 1
ROWS = (1 << MARK_SHIFT) - (1 << ROW_SHIFT)
MARKS = ((1 << MARK_BITS) - 1) << MARK_SHIFT
# An entry of a sample's own table: the number of its tokens up to the entry's end (of those past 4M tokens the low
# bits), and a mark.
OWN_MARK_SHIFT, OWN_MARK_BITS = 22, 9
MOST_ROWS = (1 << (MARK_SHIFT - ROW_SHIFT)) - 1
# Entries of a bucket, of different samples: so there are others than the asking sample's own, to take the longest match
# of. When a table is full there are twice as many as were entered: 16 bytes for each token of a response.
BUCKET = 4
ENTRIES_PER_BUCKET = 2
# Bytes of a bucket, and of a slot of a sample's own table.
BUCKET_BYTES, SLOT_BYTES = 8 * BUCKET, 4
# Bytes of a token.
WORD = 4


def table_size(buckets: int) -> int:
    """int64 in the siblings' table of a prompt that has so many buckets (a power of two)."""
    return BUCKET * buckets


@njit(cache=True, nogil=True)
def hash_before(text: Int32s, end: int, shortest: int) -> np.uint64:
    """FNV-1a over the `shortest` tokens before `end`, mixed as MurmurHash3 ends: tables use the low bits."""
    value = np.uint64(14695981039346656037)
    for back in range(1, shortest + 1):
        value = (value ^ np.uint64(text[end - back])) * np.uint64(1099511628211)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return value ^ (value >> np.uint64(33))


@njit(cache=True, nogil=True)
def enter_own(
    text: Int32s, table: int, mask: int, place: int, shortest: int, value: int, source: int, length: int
) -> tuple[int, int]:
    """Enter the token before `place` into the sample's own table (at an address, with `mask` + 1 slots).

    `value`: the hash of the `shortest` tokens before `place`, if there are so many. `source`, `length`: where the text
    after the match began before that token, and its length; returns both after it.
    """
    at = place - 1
    if length and text[source] == text[at]:
        source += 1
        length += 1
    else:
        length = 0
    if place < shortest:
        return source, length
    slot = np.int64(value & np.uint64(mask))
    mark = np.int64(value >> np.uint64(64 - OWN_MARK_BITS)) << OWN_MARK_SHIFT
    if not length:
        earlier = int32_of(table, slot) - mark
        if 0 < earlier < 1 << OWN_MARK_SHIFT:
            while length < LONGEST_MEASURED and length < earlier and text[earlier - 1 - length] == text[at - length]:
                length += 1
            if length < shortest:
                length = 0
            source = earlier
    put_int32(table, slot, mark + (place & ((1 << OWN_MARK_SHIFT) - 1)))
    return source, length


@njit(cache=True, nogil=True)
def follow_own(text: Int32s, table: int, mask: int, count: int, shortest: int) -> None:
    """Enter all `count` tokens into a sample's own table that is new."""
    source, length = 0, 0
    for place in range(1, count + 1):
        value = hash_before(text, place, shortest) if place >= shortest else np.uint64(0)
        source, length = enter_own(text, table, mask, place, shortest, value, source, length)


@njit(cache=True, nogil=True)
def _mark(value: int) -> int:
    """What an entry of the siblings' table keeps of a hash: bits that say nothing of its bucket."""
    return int(np.int64(value >> np.uint64(64 - MARK_BITS)) << MARK_SHIFT)


@njit(cache=True, nogil=True)
def enter_sibling(table: int, mask: int, row: int, place: int, value: int) -> None:
    """Enter into a siblings' table (`mask` + 1 buckets) that tokens with the hash `value` end before `place`.

    The newest first; of one sample only the newest.
    """
    bucket = BUCKET * np.int64(value & np.uint64(mask))
    whose = (row + 1) << ROW_SHIFT
    first, second, third = int64_of(table, bucket), int64_of(table, bucket + 1), int64_of(table, bucket + 2)
    # Without branches, as `vote`: whether what is newer than this sample's own last entry has to make room for it.
    others = (first & ROWS) != whose
    put_int64(table, bucket + 1, first if others else second)
    others &= (second & ROWS) != whose
    put_int64(table, bucket + 2, second if others else third)
    others &= (third & ROWS) != whose
    if others:
        put_int64(table, bucket + 3, third)
    put_int64(table, bucket, whose | place | _mark(value))


@njit(cache=True, nogil=True)
def _bucket_of(prompt: Int64s, table: int, value: int) -> int:
    """The address of the bucket for the hash `value` in one of the prompt's tables; 0: there is no such table."""
    buckets = prompt[TABLE_BUCKETS + TABLE_COLUMNS * table]
    if not buckets:
        return 0
    return prompt[TABLE + TABLE_COLUMNS * table] + BUCKET_BYTES * np.int64(value & np.uint64(buckets - 1))


@njit(cache=True, nogil=True)
def _sibling_of(entry: int, mark: int, row: int) -> tuple[int, int]:
    """The row of an entry's sample, and the place that the entry's tokens end before.

    The row is -1 where there is nothing, other tokens (they have another mark), or the sample of `row` itself.
    """
    found = ((entry & ROWS) >> ROW_SHIFT) - 1
    if (entry & MARKS) != mark or found == row:
        found = -1
    return found, entry & POSITION_MASK


@njit(cache=True, nogil=True)
def follow_sibling(samples: Int64s, row: int, text: Int32s, longest: int, shortest: int, prompt: Int64s) -> int:
    """Follow the sibling that matched, or find one that matches more; returns how many tokens match, 0 if none goes on.

    A match of `longest` tokens is followed without looking for another.
    """
    sample = samples[row]
    count = text.size
    length = sample[SIBLING_LENGTH]
    at = sample[SIBLING_AT]
    ahead = False
    if length:
        other = samples[sample[SIBLING]]
        theirs = int32s_at(other[TEXT], other[COUNT])
        for place in range(sample[FOLLOWED], count):
            if at < theirs.size and theirs[at] == text[place]:
                at += 1
                length += 1
            else:
                length = 0
                break
        ahead = length > 0 and at < theirs.size
    if (length < longest or not ahead) and count >= shortest:
        value = np.uint64(sample[HASH])
        mark = _mark(value)
        for table in range(TABLES):
            bucket = _bucket_of(prompt, table, value)
            if not bucket:
                break
            for number in range(BUCKET):
                found, place = _sibling_of(int64_of(bucket, number), mark, row)
                if found < 0 or place >= samples[found, COUNT]:
                    continue
                theirs = int32s_at(samples[found, TEXT], samples[found, COUNT])
                matched = 0
                most = min(LONGEST_MEASURED, place, count)
                while matched < most and theirs[place - 1 - matched] == text[count - 1 - matched]:
                    matched += 1
                if matched >= shortest and (matched > length or not ahead):
                    sample[SIBLING], at, length, ahead = found, place, matched, True
    sample[SIBLING_AT], sample[SIBLING_LENGTH], sample[FOLLOWED] = at, length, count
    return length if ahead else 0


@njit(cache=True, nogil=True)
def foresee_siblings(samples: Int64s, row: int, longest: int, shortest: int, prompt: Int64s) -> None:
    """Fetch the texts that `follow_sibling` will compare with the sample's."""
    sample = samples[row]
    if sample[SIBLING_LENGTH]:
        prefetch(samples[sample[SIBLING], TEXT] + WORD * sample[SIBLING_AT])
    count = sample[COUNT]
    if sample[SIBLING_LENGTH] < longest and count >= shortest:
        value = np.uint64(sample[HASH])
        mark = _mark(value)
        for table in range(TABLES):
            bucket = _bucket_of(prompt, table, value)
            if not bucket:
                break
            for number in range(BUCKET):
                found, place = _sibling_of(int64_of(bucket, number), mark, row)
                if found >= 0:
                    prefetch(samples[found, TEXT] + WORD * (place - 1))


@njit(cache=True, nogil=True)
def foresee_buckets(sample: Int64s, prompt: Int64s) -> None:
    """Fetch what `foresee_siblings` will read."""
    for table in range(TABLES):
        bucket = _bucket_of(prompt, table, np.uint64(sample[HASH]))
        if bucket:
            prefetch(bucket)


@njit(cache=True, nogil=True)
def is_crowded(prompt: Int64s) -> bool:
    """Whether so much was entered into the prompt's table that entries are often taken over."""
    return prompt[TABLE_ENTERED] > ENTRIES_PER_BUCKET * prompt[TABLE_BUCKETS]


@njit(cache=True, nogil=True)
def copy_sibling(samples: Int64s, sample: Int64s, out: Int32s) -> int:
    """What the sibling wrote after the match; returns how many tokens those are."""
    theirs = int32s_at(samples[sample[SIBLING], TEXT], samples[sample[SIBLING], COUNT])
    start = sample[SIBLING_AT]
    size = min(out.size, theirs.size - start)
    out[:size] = theirs[start : start + size]
    return size


@njit(cache=True, nogil=True)
def copy_own(sample: Int64s, text: Int32s, out: Int32s) -> None:
    """What the sample wrote after the match; where that reaches the end of its text, what follows repeats."""
    start = sample[OWN_AT]
    period = text.size - start
    for place in range(out.size):
        out[place] = text[start + place % period]


@njit(cache=True, nogil=True)
def fetch_places(
    prompt: Int64s, sample: Int64s, before: int, shortest: int, siblings: bool, hashes: Hashes, kept: int
) -> int:
    """Fetch the places in the tables of a sample's tokens behind the first `before`.

    The hashes are kept in `hashes` from `kept` on, as long as there is room; returns how many there are then.
    """
    count = sample[COUNT]
    text = int32s_at(sample[TEXT], count)
    own, table = sample[OWN_TABLE], prompt[TABLE]
    own_mask, mask = np.uint64(sample[OWN_SLOTS] - 1), np.uint64(prompt[TABLE_BUCKETS] - 1)
    votes = prompt[VOTES]
    for place in range(before + 1, count + 1):
        if place >= shortest:
            if kept == hashes.size:
                break
            value = hash_before(text, place, shortest)
            hashes[kept] = value
            kept += 1
            if own:
                prefetch(own + SLOT_BYTES * np.int64(value & own_mask))
            if siblings:
                prefetch(table + BUCKET_BYTES * np.int64(value & mask))
        if siblings:
            prefetch(votes + 8 * slot_of(SLOTS, text[place - 1]))
    return kept
