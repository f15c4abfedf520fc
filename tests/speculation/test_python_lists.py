"""Lists that compiled code reads and makes are lists as Python makes them, and nothing of them is lost or kept."""

from __future__ import annotations

import gc
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.speculation.python_lists import int_of, item_of, list_length, split, type_of

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


@njit
def type_at(address: int) -> int:
    """The type of an object."""
    return type_of(address)


def test_what_is_like_an_int_is_told_from_an_int() -> None:
    objects = (7, 2**40, True, np.int64(7), [])
    assert [type_at(id(one)) == id(int) for one in objects] == [True, True, False, False, False]


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
