"""Arrays cut from slabs: apart from each other, on whole lines, and cut again once given back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.speculation.slabs import LINE_BYTES, SLAB_BYTES, Slabs

SIZES = st.sampled_from([64, 128, 4096, SLAB_BYTES // 4, SLAB_BYTES])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=20))
def test_arrays_that_are_held_do_not_overlap(taken: list[tuple[int, bool]]) -> None:
    slabs = Slabs()
    held = []
    for nbytes, back in taken:
        array = slabs.take(np.int32, nbytes // 4)
        begin = array.ctypes.data
        assert array.size == nbytes // 4 and begin % LINE_BYTES == 0
        for other in held:
            assert not np.shares_memory(array, other)
        if back:
            slabs.give(array)
        else:
            held.append(array)


def test_what_was_given_back_is_cut_again() -> None:
    slabs = Slabs()
    first = slabs.take(np.int64, 64)
    begin = first.ctypes.data
    slabs.give(first)
    assert slabs.take(np.int32, 64).ctypes.data != begin
    assert slabs.take(np.int32, 128).ctypes.data == begin
