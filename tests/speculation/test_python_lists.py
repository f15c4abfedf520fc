"""Lists that compiled code reads and makes are lists as Python makes them, and nothing of them is lost or kept."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int64_of, put_int64
from rhyme_openrlhf.speculation.python_lists import (
    ITEMS,
    KEPT_AHEAD,
    give_up,
    int_of,
    item_of,
    kept_int_list,
    list_length,
    split,
)

PARTS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=40), max_size=20)


@njit
def read(texts: int, out: NDArray[np.int64]) -> int:
    """All items of all lists in a list."""
    found = 0
    for number in range(list_length(texts)):
        text = item_of(texts, number)
        for place in range(list_length(text)):
            out[found] = int_of(item_of(text, place))
            found += 1
    return found


@settings(deadline=None, derandomize=True)
@given(PARTS)
def test_lists_are_read_and_made(parts: list[list[int]]) -> None:
    flat = [token for part in parts for token in part]
    out = np.empty(len(flat), dtype=np.int64)
    assert read(id(parts), out) == len(flat)
    assert out.tolist() == flat
    assert split(np.array(flat, dtype=np.int32), np.array([len(part) for part in parts], dtype=np.int64)) == parts


def test_they_belong_to_who_got_them() -> None:
    flat, lengths = np.arange(1000, 1006, dtype=np.int32), np.array([0, 4, 2])
    parts = split(flat, lengths)
    other = [[], [1000, 1001, 1002, 1003], [1004, 1005]]
    assert parts == other
    for made, usual in zip(parts, other, strict=True):
        assert type(made) is list and gc.is_tracked(made) == gc.is_tracked(usual)
    assert sys.getrefcount(parts[1]) == sys.getrefcount(other[1])
    item = parts[1].pop()
    assert type(item) is int and sys.getrefcount(item) == 2


@njit
def put_kept_list(flat: NDArray[np.int32], begin: int, size: int, kept: int, first: int, out: int, number: int) -> None:
    """As item `number` of a list."""
    items = int64_of(out, ITEMS)
    before = int64_of(items, number)
    put_int64(items, number, kept_int_list(flat, begin, size, kept, first))
    give_up(before)


def lists_of_kept(kept: list[Any], first: int, parts: list[list[int]]) -> list[list[int]]:
    """`parts` again, of ints that `kept` has from `first` on."""
    flat = np.array([token for part in parts for token in part], dtype=np.int32)
    out: list[Any] = [None] * len(parts)
    begin = 0
    for number, part in enumerate(parts):
        put_kept_list(flat, begin, len(part), id(kept), first + begin, id(out), number)
        begin += len(part)
    return out


STEPS = st.lists(st.tuples(PARTS, st.booleans(), st.sets(st.integers(0, 19))), max_size=6)


@settings(deadline=None, derandomize=True)
@given(STEPS)
def test_ints_are_used_again_only_where_nobody_else_has_them(
    steps: list[tuple[list[list[int]], bool, set[int]]],
) -> None:
    kept: list[Any] = [None] * (2 * 800 + KEPT_AHEAD)
    held: list[tuple[list[int], list[int]]] = []
    for parts, half, holding in steps:
        found = lists_of_kept(kept, 800 * half, parts)
        assert found == parts
        assert all(type(token) is int for part in found for token in part)
        # The same objects as Python has, where it has an int once only.
        assert all(token is int(str(token)) for part in found for token in part if token < 257)
        held += [(found[number], parts[number]) for number in holding if number < len(parts)]
        del found
        assert all(mine == theirs for mine, theirs in held)


def test_kept_ints_are_not_lost() -> None:
    kept: list[Any] = [None] * (10 + KEPT_AHEAD)
    (first,) = lists_of_kept(kept, 0, [[1000, 1001, 1002]])
    # In both lists, and asked about by name.
    assert [sys.getrefcount(token) for token in first] == [4, 4, 4] and kept[:3] == first
    addresses, other = [id(token) for token in first[:2]], first[2]
    del first
    (second,) = lists_of_kept(kept, 0, [[2000, 2001, 2002]])
    assert second == [2000, 2001, 2002] and other == 1002
    assert [id(token) for token in second[:2]] == addresses and second[2] is not other
    assert sys.getrefcount(other) == 2
    del kept
    assert second == [2000, 2001, 2002]


def test_what_kept_ints_replace_is_not_kept() -> None:
    kept: list[Any] = [None] * (1000 + KEPT_AHEAD)
    nones = sys.getrefcount(None)
    lists_of_kept(kept, 0, [list(range(1000, 2000))])
    # Others come and go meanwhile.
    assert abs(nones - 1000 - sys.getrefcount(None)) < 100
