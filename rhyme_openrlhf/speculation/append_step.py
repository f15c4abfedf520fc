"""The new tokens of one step's samples: into their texts and the tables that drafts come from, in one compiled call.

Samples are worked on in groups, in passes, as in `speculation/draft_step.py`: the first ones fetch what Python has of
the new tokens, the next writes each text and fetches the places in the tables of its new tokens, the last enters them.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int32s_at, prefetch
from rhyme_openrlhf.speculation.likely_next import SLOTS, vote
from rhyme_openrlhf.speculation.python_lists import foresee_items, int_of, item_of, list_length, type_of
from rhyme_openrlhf.speculation.rows import (
    CAPACITY,
    COUNT,
    ENOUGH,
    HASH,
    LIST,
    OWN_AT,
    OWN_LENGTH,
    OWN_SLOTS,
    OWN_TABLE,
    PROMPT,
    PROMPT_TOKENS,
    SAMPLE_COLUMNS,
    TABLE,
    TABLE_BUCKETS,
    TABLE_ENTERED,
    TEXT,
    VOTES,
)
from rhyme_openrlhf.speculation.text_tables import (
    WORD,
    enter_own,
    enter_sibling,
    fetch_places,
    hash_before,
    is_crowded,
)

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 1782908188

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Hashes = NDArray[np.uint64]

# Samples that are worked on together, as in draft_step.py; what is fetched for each is about 30 lines of 64 bytes.
GROUP = 16
# Hashes of new tokens that are kept from one pass to the next; those of more are made again.
KEPT_HASHES = 1024
# New tokens of a sample that are fetched; those of more are in rows of memory mostly, which the processor notices.
FORESEEN_TOKENS = 16
# Bytes of a sample's row, and of a cache line.
ROW_BYTES, LINE = 8 * SAMPLE_COLUMNS, 64


@njit(cache=True)
def append(
    samples: Int64s, prompts: Int64s, rows: Int64s, first: int, shortest: int, siblings: bool, kind: int, grows: Int64s
) -> int:
    """Add to each of some samples what is new in its list of tokens, from number `first` of `rows` on.

    Returns the first number whose text has no room for its part, or whose new tokens are not all of the type `kind`
    (an address; 0: any will do), or `rows.size`. `grows[number]`: whether its memory should grow for the steps to come.
    """
    hashes = np.empty(KEPT_HASHES, dtype=np.uint64)
    befores = np.empty(GROUP, dtype=np.int64)
    foresee_rows(samples, rows, first, min(rows.size, first + GROUP))
    while first < rows.size:
        last = min(rows.size, first + GROUP)
        foresee_rows(samples, rows, last, min(rows.size, last + GROUP))
        for number in range(first, last):
            prefetch(samples[rows[number], LIST])
        for number in range(first, last):
            sample = samples[rows[number]]
            foresee_items(sample[LIST], sample[COUNT])
            prefetch(sample[TEXT] + WORD * sample[COUNT])
            prefetch(sample[TEXT] + WORD * sample[OWN_AT])
        for number in range(first, last):
            _foresee_tokens(samples[rows[number]])
        end, kept = first, 0
        while end < last:
            sample = samples[rows[end]]
            befores[end - first] = sample[COUNT]
            if not _write(sample, kind):
                break
            kept = fetch_places(prompts[sample[PROMPT]], sample, befores[end - first], shortest, siblings, hashes, kept)
            end += 1
        kept = 0
        for number in range(first, end):
            row = rows[number]
            sample = samples[row]
            prompt = prompts[sample[PROMPT]]
            kept = _enter(sample, prompt, row, befores[number - first], shortest, siblings, hashes, kept)
            grows[number] = sample[COUNT] > sample[ENOUGH] or (siblings and is_crowded(prompt))
        first = end
        if end < last:
            break
    return first


@njit(cache=True, nogil=True)
def foresee_rows(samples: Int64s, rows: Int64s, first: int, last: int) -> None:
    """Fetch the rows of the samples with the numbers from `first` to before `last`."""
    for number in range(first, last):
        row = samples.ctypes.data + ROW_BYTES * rows[number]
        for line in range(0, ROW_BYTES, LINE):
            prefetch(row + line)


@njit(cache=True)
def _foresee_tokens(sample: Int64s) -> None:
    """Fetch the new ints of a sample's list."""
    tokens, before = sample[LIST], sample[COUNT]
    for at in range(before, min(list_length(tokens), before + FORESEEN_TOKENS)):
        prefetch(item_of(tokens, at))


@njit(cache=True)
def _write(sample: Int64s, kind: int) -> bool:
    """Write the new ones of a sample's list of tokens behind its text; False: no room, or one is not of type `kind`."""
    tokens, before = sample[LIST], sample[COUNT]
    count = list_length(tokens)
    if count > sample[CAPACITY]:
        return False
    if count > before:
        text = int32s_at(sample[TEXT], count)
        for at in range(before, count):
            token = item_of(tokens, at)
            if kind and type_of(token) != kind:
                return False
            text[at] = int_of(token)
        sample[COUNT] = count
    return True


@njit(cache=True)
def _enter(
    sample: Int64s, prompt: Int64s, row: int, before: int, shortest: int, siblings: bool, hashes: Hashes, kept: int
) -> int:
    """Enter a sample's tokens behind the first `before` into its own table, and its prompt's.

    Their `hashes` are from `kept` on, as far as there was room; returns where those of the next sample are.
    """
    count = sample[COUNT]
    text = int32s_at(sample[TEXT], count)
    # What precedes the response's first token is entered; the rest of the prompt is the same in all.
    start = max(before + 1, sample[PROMPT_TOKENS])
    last = np.uint64(sample[HASH])
    own, own_mask = sample[OWN_TABLE], sample[OWN_SLOTS] - 1
    table, mask = prompt[TABLE], prompt[TABLE_BUCKETS] - 1
    votes = prompt[VOTES]
    source, length = sample[OWN_AT], sample[OWN_LENGTH]
    for place in range(before + 1, count + 1):
        value = np.uint64(0)
        if place >= shortest:
            if kept < hashes.size:
                value = hashes[kept]
                kept += 1
            else:
                value = hash_before(text, place, shortest)
            last = value
        if own_mask >= 0:
            source, length = enter_own(text, own, own_mask, place, shortest, value, source, length)
        if siblings and place >= start:
            if place >= shortest:
                enter_sibling(table, mask, row, place, value)
            if place > 1:
                vote(votes, SLOTS, text[place - 2], text[place - 1])
    sample[OWN_AT], sample[OWN_LENGTH] = source, length
    sample[HASH] = np.int64(last)
    if siblings:
        prompt[TABLE_ENTERED] += max(0, count + 1 - max(start, shortest))
    return kept
