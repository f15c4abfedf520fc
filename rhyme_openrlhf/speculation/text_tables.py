"""Where the same few tokens occurred before, in a sample's own text and in its siblings' texts.

Siblings and own text are found through hash tables of where the same `shortest` tokens ended before, and a match is
then followed from step to step, so that it may be any number of tokens long.

Invariants: a token costs the same however many there are; a table slot that other tokens took over loses a match and
never gives a wrong one, because every match is compared with the texts; a sibling's draft ends where the sibling is.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int32s_at, int64s_at, prefetch
from rhyme_openrlhf.speculation.likely_next import SLOT, slot_of, vote_next
from rhyme_openrlhf.speculation.rows import (
    COUNT,
    FOLLOWED,
    OWN_AT,
    OWN_SLOTS,
    OWN_TABLE,
    SIBLING,
    SIBLING_AT,
    SIBLING_LENGTH,
    TABLE,
    TABLE_BUCKETS,
    TABLE_ENTERED,
    TEXT,
)

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 2525569065

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# How far back a new match is measured. Longer ones are all the same: certain enough.
LONGEST_MEASURED = 32
# An entry of the siblings' table: the sample's row + 1, and the number of its tokens up to the entry's end.
ROW_SHIFT = 32
POSITION_MASK = (1 << ROW_SHIFT) - 1
# Entries of a bucket, of different samples: so there are others than the asking sample's own, to take the longest match
# of. There are two to four times as many as were entered: 16 to 32 bytes for each token of a response.
BUCKET = 4
ENTRIES_PER_BUCKET = 2
# Bytes of a bucket, and of a slot of a sample's own table.
BUCKET_BYTES, SLOT_BYTES = 8 * BUCKET, 4
# Bytes of a token.
WORD = 4
# Behind its buckets, a siblings' table has slots of what mostly followed a token: one for so many buckets, because a
# text has fewer different tokens than tokens.
BUCKETS_PER_SLOT = 2


def table_size(buckets: int) -> int:
    """int64 in the siblings' table of a prompt that has so many buckets (a power of two)."""
    return BUCKET * buckets + SLOT * (buckets // BUCKETS_PER_SLOT)


@njit(cache=True, nogil=True)
def hash_before(text: Int32s, end: int, shortest: int) -> np.uint64:
    """FNV-1a over the `shortest` tokens before `end`, mixed as MurmurHash3 ends: tables use the low bits."""
    value = np.uint64(14695981039346656037)
    for back in range(1, shortest + 1):
        value = (value ^ np.uint64(text[end - back])) * np.uint64(1099511628211)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return value ^ (value >> np.uint64(33))


@njit(cache=True, nogil=True)
def follow_own(
    text: Int32s, table: Int32s, start: int, end: int, shortest: int, source: int, length: int
) -> tuple[int, int]:
    """Enter the tokens from `start` to `end`; returns where the text after the match begins, and the match's length."""
    mask = np.uint64(table.size - 1)
    for at in range(start, end):
        if length and text[source] == text[at]:
            source += 1
            length += 1
        else:
            length = 0
        if at + 1 < shortest:
            continue
        place = np.int64(hash_before(text, at + 1, shortest) & mask)
        earlier = int(table[place])
        if not length and earlier:
            while length < LONGEST_MEASURED and length < earlier and text[earlier - 1 - length] == text[at - length]:
                length += 1
            if length < shortest:
                length = 0
            source = earlier
        table[place] = at + 1
    return source, length


@njit(cache=True, nogil=True)
def enter_siblings(prompt: Int64s, text: Int32s, row: int, start: int, end: int, shortest: int) -> None:
    """Enter into the prompt's table where the tokens before each place from `start` to `end` occurred last."""
    table = int64s_at(prompt[TABLE], BUCKET * prompt[TABLE_BUCKETS])
    mask = np.uint64(prompt[TABLE_BUCKETS] - 1)
    first = max(start, shortest)
    for place in range(first, end + 1):
        bucket = BUCKET * np.int64(hash_before(text, place, shortest) & mask)
        # The newest first; of one sample only the newest.
        last = bucket
        while last < bucket + BUCKET - 1 and (table[last] >> ROW_SHIFT) != row + 1:
            last += 1
        for at in range(last, bucket, -1):
            table[at] = table[at - 1]
        table[bucket] = ((row + 1) << ROW_SHIFT) | place
    vote_next(next_table(prompt), text, max(1, start - 1), end)
    prompt[TABLE_ENTERED] += max(0, end + 1 - first)


@njit(cache=True, nogil=True)
def next_table(prompt: Int64s) -> Int64s:
    """The slots behind the buckets of the prompt's table."""
    buckets = prompt[TABLE_BUCKETS]
    return int64s_at(prompt[TABLE] + 8 * BUCKET * buckets, SLOT * (buckets // BUCKETS_PER_SLOT))


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
        table = int64s_at(prompt[TABLE], BUCKET * prompt[TABLE_BUCKETS])
        bucket = BUCKET * np.int64(hash_before(text, count, shortest) & np.uint64(prompt[TABLE_BUCKETS] - 1))
        for entry in table[bucket : bucket + BUCKET]:
            found = (entry >> ROW_SHIFT) - 1
            place = entry & POSITION_MASK
            if entry == 0 or found == row or place >= samples[found, COUNT]:
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
        text = int32s_at(sample[TEXT], count)
        table = int64s_at(prompt[TABLE], BUCKET * prompt[TABLE_BUCKETS])
        bucket = BUCKET * np.int64(hash_before(text, count, shortest) & np.uint64(prompt[TABLE_BUCKETS] - 1))
        for entry in table[bucket : bucket + BUCKET]:
            if entry and (entry >> ROW_SHIFT) - 1 != row:
                prefetch(samples[(entry >> ROW_SHIFT) - 1, TEXT] + WORD * ((entry & POSITION_MASK) - 1))


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
def fetch_places(prompt: Int64s, sample: Int64s, text: Int32s, before: int, shortest: int, siblings: bool) -> None:
    """Fetch the places in the tables of the tokens of `text` behind the first `before`."""
    own_mask, mask = np.uint64(sample[OWN_SLOTS] - 1), np.uint64(prompt[TABLE_BUCKETS] - 1)
    for place in range(before + 1, text.size + 1):
        if place >= shortest:
            value = hash_before(text, place, shortest)
            if sample[OWN_SLOTS]:
                prefetch(sample[OWN_TABLE] + SLOT_BYTES * np.int64(value & own_mask))
            if siblings:
                prefetch(prompt[TABLE] + BUCKET_BYTES * np.int64(value & mask))
        if siblings:
            votes = next_table(prompt)
            prefetch(prompt[TABLE] + BUCKET_BYTES * prompt[TABLE_BUCKETS] + 8 * slot_of(votes, text[place - 1]))
