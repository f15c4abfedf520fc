"""The compiled core at its edges: every wrong input is an exception and never a crash."""

from __future__ import annotations

import random
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.history.index import (
    CHECKSUM,
    CHECKSUM_AT,
    HEADER_BYTES,
    DraftIndex,
    IndexBufferError,
    Piece,
    _checksum,
    build_index,
)
from tests.examples import examples

RULES = {
    "longest": 16, "shortest": 2, "siblings": True, "own_output": True, "window_start": 2, "window_step": 2,
    "window_max": 32, "extend_confidence": 0.7, "stop_confidence": 0.5, "shared_tokens": 0,
}  # fmt: skip


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=5))
def test_lists_become_arrays_and_lists_again(lists: list[list[int]]) -> None:
    counts, tokens = core.flatten(lists)
    assert counts.tolist() == [len(one) for one in lists] and (counts.dtype, tokens.dtype) == (np.int64, np.int32)
    assert core.split(tokens, counts) == lists


def test_what_is_like_an_int_is_one_and_other_things_are_refused() -> None:
    assert core.flatten([[np.int64(3), True]])[1].tolist() == [3, 1]
    assert core.flatten(np.array([[1, 2]]))[1].tolist() == core.flatten([(1, 2)])[1].tolist() == [1, 2]
    for bad in (["x"], [[1.5]], [["x"]], [[2**70]], [[2**31]], [3], 3):
        with pytest.raises((TypeError, OverflowError, ValueError)):
            core.flatten(bad)


@pytest.mark.parametrize("lengths", [[1, 3], [-1], [4]])
def test_lengths_that_are_not_those_of_the_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        core.split([1, 2, 3], lengths)


def test_samples_that_do_not_run_are_refused_and_change_nothing() -> None:
    drafter = core.Drafter(**RULES)
    sample = drafter.start("p", [1, 2, 3, 1, 2], 1, 100, 2)
    gone = drafter.start("p", [1], 1, 100, 2)
    drafter.finish(gone)
    one = [1]
    for bad in (gone, 7, -2):
        calls = (
            lambda bad=bad: drafter.append([sample, bad], [1, 1], [9, 9]),
            lambda bad=bad: drafter.draft([sample, bad], False),
            lambda bad=bad: drafter.verified([sample, bad], [2, 2], [2, 2]),
            lambda bad=bad: drafter.window(bad),
            lambda bad=bad: drafter.finish(bad),
        )
        for call in calls:
            with pytest.raises(IndexError, match=f"sample {bad} has not started"):
                call()
    for counts, tokens in (([2], one), ([-1], []), (one, one * 2), ([1, 1], one)):
        with pytest.raises(ValueError, match="count|tokens"):
            drafter.append([sample], counts, tokens)
    assert drafter.window(sample) == 2
    lengths, tokens, *_ = drafter.draft([sample, core.NO_SAMPLE], False)
    assert lengths.tolist() == [2, 0] and tokens.tolist() == [3, 1]


def test_impossible_rules_are_refused() -> None:
    for changes in ({"shortest": 0}, {"shortest": 17}, {"window_start": 0}, {"window_start": 33}, {"window_step": -1}):
        with pytest.raises(ValueError, match="need 1 <="):
            core.Drafter(**(RULES | changes))


def test_tokens_that_are_none_are_refused_and_change_nothing() -> None:
    """A negative one would be drafted, and one of more than 31 bits would become another."""
    drafter = core.Drafter(**RULES)
    sample = drafter.start("p", [1, 2, 3], 1, 100, 2)
    other = drafter.start("p", [4], 1, 100, 2)
    for bad in (-1, -(2**31), 2**31, 2**32 + 5, 2**40):
        with pytest.raises(ValueError, match="token"):
            drafter.append([sample, other], [1, 2], np.array([7, 8, bad]))
        with pytest.raises(ValueError, match="token"):
            drafter.start("p", [1, bad], 1, 100, 2)
        with pytest.raises(ValueError, match="token"):
            core.build([1, bad, -1], [3], [0])
    with pytest.raises(TypeError):
        drafter.append([sample], [1], np.array([2.0]))
    drafter.append([sample], [2], [1, 2])
    assert drafter.draft([sample], False)[1].tolist() == [3, 1]
    # The samples that could not start are gone: the next one has the row of the first of them.
    assert drafter.start("p", [1], 1, 100, 2) == 2


@pytest.mark.parametrize("change", ["window_max", "window_step"])
def test_numbers_that_would_overflow_are_refused(change: str) -> None:
    with pytest.raises(ValueError, match="window"):
        core.Drafter(**(RULES | {change: 2**62}))
    with pytest.raises(ValueError, match="longest"):
        core.Drafter(**(RULES | {"longest": 2**62}))
    drafter = core.Drafter(**RULES)
    with pytest.raises(ValueError, match="text"):
        drafter.start("p", [1], 1, -(2**63), 2)
    sample = drafter.start("p", [1, 2, 3, 1, 2], 1, 2**63 - 1, 2)
    assert drafter.draft([sample], False)[1].tolist() == [3, 1]
    huge = [2**62, 2**62, 2**62, 2**62]
    for call in (
        lambda: core.choose([], huge, [1.0], 4, 0),
        lambda: core.cut([], huge, huge),
        lambda: drafter.append([sample] * 4, huge, []),
    ):
        with pytest.raises(ValueError, match="do not fit|as many tokens"):
            call()


def test_learning_that_fails_counts_nothing() -> None:
    offered, accepted = np.zeros(4), np.zeros(4)
    with pytest.raises(ValueError, match="do not fit"):
        core.learn(offered, accepted, [0, 9], [1, 1], [0, 1], [1, 1], [1, 1])
    assert not offered.any() and not accepted.any()


def test_a_list_that_changes_while_it_is_read_is_read_as_it_is() -> None:
    tokens: list[object] = [1]

    class Clears:
        def __index__(self) -> int:
            tokens.clear()
            return 5

    tokens += [Clears(), *range(1000)]
    counts, flat = core.flatten([tokens])
    assert counts.tolist() == [2] and flat.tolist() == [1, 5]


@pytest.mark.parametrize(
    ("text", "lengths", "rewards"),
    [
        ([1, -1, 1, -1], [4], [0]),
        ([1, -1], [3], [0]),
        ([1, 2], [2], [0]),
        ([1, -1], [2, 0], [0, 0]),
        ([1, -1, 5], [2], [0]),
        ([-1], [1], []),
    ],
)
def test_pieces_that_do_not_fit_their_text_are_refused(text: list[int], lengths: list[int], rewards: list[int]) -> None:
    with pytest.raises(ValueError, match="draft index"):
        core.build(text, lengths, rewards)


def example() -> np.ndarray:
    return build_index([Piece([1, 2, 3], [4, 5, 6, 1, 2, 3, 4, 9], 1.0), Piece([1, 2, 3], [4, 7], 0.0)])


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_torn_damaged_and_foreign_buffers_are_refused_and_never_crash(seed: int) -> None:
    """With the checksum made to fit, so that what is behind it is asked: sizes and counts that are not those."""
    rng = random.Random(seed)
    buffer = bytearray(example().tobytes())
    kind = rng.randrange(3)
    if kind == 0:
        buffer = buffer[: rng.randrange(len(buffer))] + bytes(rng.randrange(3) * 8)
    elif kind == 1:
        for _ in range(rng.randint(1, 4)):
            buffer[rng.randrange(8, HEADER_BYTES)] = rng.randrange(256)
    else:
        buffer = bytearray(rng.randbytes(rng.randrange(400)))
    raw = np.frombuffer(bytes(buffer), dtype=np.uint8).copy()
    before = raw.tobytes() == example().tobytes()
    if raw.size >= HEADER_BYTES:
        raw[CHECKSUM_AT:HEADER_BYTES] = np.frombuffer(CHECKSUM.pack(_checksum(raw)), dtype=np.uint8)
    try:
        opened = DraftIndex.from_buffer(raw)
    except IndexBufferError:
        assert not before
        return
    # What is left of the header's content says nothing of the arrays: the index is as it was.
    assert opened.draft([1, 2, 3], 7, 2, 8).tokens[0] == 4


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_an_index_with_any_content_never_reads_beyond_it(seed: int) -> None:
    """Of damage behind a header that is right only the checksum knows. The sanitized core sees where it reads."""
    rng = random.Random(seed)
    buffer = build_index([Piece([1, 2, 3], [rng.randrange(3) for _ in range(90)], float(n % 2)) for n in range(3)])
    for _ in range(rng.choice([1, 10, 300])):
        kind, at = rng.choice([np.uint8, np.int32, np.int64]), rng.random()
        numbers = buffer[HEADER_BYTES:].view(kind)
        numbers[int(at * numbers.size)] = rng.choice([0, 1, 2, 100, 255, np.iinfo(kind).max, np.iinfo(kind).min])
    try:
        index = core.Index(buffer)
    except core.BufferError:
        return
    drafter = core.Drafter(**(RULES | {"siblings": False, "own_output": False}))
    drafter.install("p", index)
    sample = drafter.start("p", [1, 2, 3], 1, 1000, 2)
    for _ in range(30):
        _, tokens, *_ = drafter.draft([sample], bool(rng.randrange(2)))
        assert (tokens >= 0).all()
        part = [*tokens[: rng.randrange(33)], rng.randrange(3)]
        drafter.append([sample], [len(part)], part)


@pytest.mark.parametrize("array", ["suffixes", "places", "grades"])
def test_numbers_that_lead_out_of_an_index_are_refused(array: str) -> None:
    buffer = example().copy()
    pieces, count = np.frombuffer(buffer[12:16], np.uint32)[0], np.frombuffer(buffer[16:24], np.int64)[0]
    begin = HEADER_BYTES + 8 * int(pieces) + 8 * (int(count) // 32 + 1)
    # Three arrays of int32, each padded to 8 bytes, are before the grades.
    begin += (int(count) * 4 + 7) // 8 * 8 * ["suffixes", "places", "tokens", "grades"].index(array)
    for value in (-1, 127) if array != "grades" else (2, 255):
        damaged = buffer.copy()
        damaged[begin : begin + 4] = np.frombuffer(struct.pack("<i", value), np.uint8)
        with pytest.raises(core.BufferError, match="damaged"):
            core.Index(damaged)


@pytest.mark.usefixtures("starts_python")
def test_a_core_that_was_not_built_is_named_where_it_is_needed_and_not_before() -> None:
    """After an installation without a compiler everything imports, and the first draft index is refused."""
    program = (
        "import sys; sys.modules['rhyme_openrlhf._drafting'] = None\n"
        "import rhyme_openrlhf.history.shard, rhyme_openrlhf.drafting.source\n"
        "from rhyme_openrlhf.drafting_core import CoreMissing, instruction_set\n"
        "from rhyme_openrlhf.history.index import build_index\n"
        "assert instruction_set() is None\n"
        "try: build_index([])\n"
        "except CoreMissing as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert "install a C++20 compiler (Debian: apt-get install g++) and run pip install again" in sentence
