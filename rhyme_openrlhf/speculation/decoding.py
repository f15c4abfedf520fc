"""Between the requests of vLLM's scheduler and the rows that drafts are made for, in compiled code.

Which requests of a step decode, where the tokens of each are, and giving each its draft: in Python these loops took as
long as drafting. What is read of a request is what vLLM's own `update_draft_token_ids` reads (0.29.0,
`v1/core/sched/scheduler.py`), and `_all_token_ids`, the list that its `all_token_ids` is a view of.

Mostly a step has the requests of the one before at the same places; then a name is compared by its address, and nothing
is looked up. Invariant: a row's NAME and ATTRIBUTES are addresses of what lives as long as the row has them, or 0.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int64_of, prefetch, uint8_of
from rhyme_openrlhf.speculation.python_lists import (
    dict_item,
    get_attribute,
    give_up,
    int_list,
    int_of,
    item_of,
    list_length,
    set_attribute,
)
from rhyme_openrlhf.speculation.rows import ATTRIBUTES, LIST, NAME, REQUEST, SAMPLE_COLUMNS

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 2731610465

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

# Attributes of a request, by vLLM's names for them.
TOKENS, STATUS, CHUNK, DRAFT = "_all_token_ids", "status", "is_prefill_chunk", "spec_token_ids"
# Numbers ahead of the one that is worked on, at which memory is fetched: one after the other takes some 40 ns.
AHEAD = 6
# Where CPython (3.11 to 3.13) has what it reads for an attribute, all of it only fetched: in a dict the address of its
# keys, in words; in those the logarithm of how many bytes of hash table follow their header, in bytes; then entries of
# a name and a value. A request has more attributes than an object without a dict of its own can have.
KEYS = 4
LOG_TABLE, HEADER, ENTRY = 9, 32, 16
LINE = 64
# More bytes of hash table no request has.
MOST_LOG = 7
# No row: the request has finished, or has none.
GONE = -1


@njit(cache=True)
def note_lists(samples: Int64s, rows: Int64s, names: int, texts: int) -> None:
    """The samples whose rows are in the list `names` (its address) have their tokens in the lists of `texts`."""
    for number in range(list_length(names)):
        rows[number] = int_of(item_of(names, number))
        samples[rows[number], LIST] = item_of(texts, number)


@njit(cache=True)
def tokens_listed(samples: Int64s, row: int) -> int:
    """How many tokens the list of a sample has."""
    return list_length(samples[row, LIST])


@njit(cache=True)
def find_decoding(
    samples: Int64s, names: int, rows_by_name: int, last: Int64s, rows: Int64s, status: int, chunk: int,
    running: int, false: int, status_place: int, chunk_place: int,
) -> int:  # fmt: skip
    """The rows of the requests in the list `names` that decode, into `rows`; returns how many they are.

    `rows_by_name`: a dict; `last`: of each place in the list the row that was there the last time, or GONE; `status`
    and `chunk`: the attributes' names, and `running` and `false` what they are of a request that decodes, all
    by address; and at which places of a request's dict they probably are.
    """
    found, asked = 0, list_length(names)
    for number in range(asked):
        foresee(samples, last, number, asked, status_place, chunk_place)
        name, row = item_of(names, number), last[number]
        if row == GONE or samples[row, NAME] != name:
            known = dict_item(rows_by_name, name)
            row = int_of(known) if known else GONE
            last[number] = row
            if row == GONE:
                continue
        request = samples[row, REQUEST]
        if _is(request, status, running) and _is(request, chunk, false):
            rows[found] = row
            found += 1
    return found


@njit(cache=True)
def foresee(samples: Int64s, rows: Int64s, number: int, end: int, first: int, last: int) -> None:
    """Fetch, of requests of later numbers, first the row, then the object and its dict, then what is in the dict.

    That is the hash table, and the entries `first` and `last`.
    """
    later = number + 3 * AHEAD
    if later < end and rows[later] != GONE:
        prefetch(samples.ctypes.data + 8 * (SAMPLE_COLUMNS * rows[later] + LIST))
    later = number + 2 * AHEAD
    if later < end and rows[later] != GONE:
        prefetch(samples[rows[later], REQUEST])
        prefetch(samples[rows[later], ATTRIBUTES] + 8 * KEYS)
    later = number + AHEAD
    if later < end and rows[later] != GONE:
        attributes = samples[rows[later], ATTRIBUTES]
        if attributes:
            keys = int64_of(attributes, KEYS)
            entries = keys + HEADER + (1 << (uint8_of(keys, LOG_TABLE) & MOST_LOG))
            for line in range(keys, entries, LINE):
                prefetch(line)
            prefetch(entries + ENTRY * first)
            prefetch(entries + ENTRY * last)


@njit(cache=True)
def _is(address: int, name: int, expected: int) -> bool:
    """Whether the attribute of that name is this very object."""
    value = get_attribute(address, name)
    give_up(value)
    return value == expected


@njit(cache=True)
def give_drafts(samples: Int64s, rows: Int64s, flat: Int32s, lengths: Int64s, attribute: int, place: int) -> None:
    """Make a list of each draft that has tokens, and the attribute of its request with that name (an address).

    `place`: where that probably is in a request's dict.
    """
    begin = 0
    for number in range(lengths.size):
        foresee(samples, rows, number, lengths.size, place, place)
        give_draft(samples[rows[number], REQUEST], flat, begin, lengths[number], attribute)
        begin += lengths[number]


@njit(cache=True)
def give_draft(request: int, flat: Int32s, begin: int, size: int, attribute: int) -> None:
    """Make a list of `size` tokens of `flat` from `begin` on, if there are any, and the attribute of the request."""
    if size:
        made = int_list(flat, begin, size)
        set_attribute(request, attribute, made)
        give_up(made)
