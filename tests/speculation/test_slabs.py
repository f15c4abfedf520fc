"""Arrays cut from slabs: apart from each other, on whole lines, and cut again once given back."""

from __future__ import annotations

import resource

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rhyme_openrlhf.speculation.slabs import LINE_BYTES, PAGE_BYTES, SLAB_BYTES, Slabs, aligned, have_pages

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


def faults_of_writing(memory: NDArray[np.uint8]) -> int:
    """How often this thread waited for the kernel to find a page."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[::PAGE_BYTES] = 7
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_memory_has_pages_before_it_is_used() -> None:
    memory = aligned(8 * SLAB_BYTES)
    memory[::PAGE_BYTES] = np.arange(0, memory.size, PAGE_BYTES) % 251
    have_pages(memory)
    assert (memory[::PAGE_BYTES] == np.arange(0, memory.size, PAGE_BYTES) % 251).all()
    # On huge pages there is one in 2 MB.
    huge_pages = 8 * SLAB_BYTES // (2 << 20)
    assert faults_of_writing(aligned(8 * SLAB_BYTES)) >= huge_pages - 1
    fresh = aligned(8 * SLAB_BYTES)
    have_pages(fresh)
    assert faults_of_writing(fresh) <= huge_pages // 4


def test_half_a_slab_ahead_the_next_one_is_there() -> None:
    slabs, quarter = Slabs(), SLAB_BYTES // 4
    for _ in range(2):
        slabs.take(np.uint8, quarter)
    assert slabs._next is None
    slabs.take(np.uint8, quarter)
    after = slabs._next
    assert after is not None
    slabs.take(np.uint8, quarter)
    assert slabs._next is after
    assert slabs.take(np.uint8, quarter).ctypes.data == after.ctypes.data
    assert slabs._next is None
