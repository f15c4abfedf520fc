"""The draft index against a brute-force reading of its rules, and its buffer against damage."""

from __future__ import annotations

import math
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.history.index import (
    CHECKSUM,
    CHECKSUM_AT,
    HEADER_BYTES,
    OLDEST_VERSION,
    VERSION,
    Draft,
    DraftIndex,
    IndexBufferError,
    Piece,
    _checksum,
    build_index,
)
from tests.examples import examples

# As csrc/search.cpp and index.h have them.
CONFIDENCE_A, CONFIDENCE_B, SHORT_MATCH_FACTOR, SURE_MATCH = 0.5, 0.55, 0.92, 12
LOOKED_AT = 64
# Few different tokens, so that random pieces share prefixes, branch and repeat themselves.
TOKENS = st.lists(st.integers(0, 2), max_size=14)
# Multiples of a quarter add up exactly in the oracle's floats too.
REWARDS = st.sampled_from([-1.0, -0.25, 0.0, 0.25, 0.5, 1.0, 3.0, math.nan, math.inf])
PIECES = st.lists(st.builds(Piece, st.lists(st.integers(0, 2), max_size=3), TOKENS, REWARDS), max_size=6)
CONTEXTS = st.lists(st.integers(-1, 3), max_size=8)


def oracle(pieces: list[Piece], context: list[int], prefix_max: int, prefix_min: int, limit: int) -> Draft:
    """The rules of `history/index.py`, by looking at every position of every piece."""
    texts = [[*piece.context, *piece.tokens] for piece in pieces]
    rewards = [piece.reward if math.isfinite(piece.reward) else 0.0 for piece in pieces]
    for length in range(min(prefix_max, len(context)), prefix_min - 1, -1):
        prefix = context[-length:]
        # A node is the set of places (piece, position) where its path ends.
        node = [
            (number, start + length)
            for number, text in enumerate(texts)
            for start in range(len(text) - length + 1)
            if text[start : start + length] == prefix
        ]
        draft: list[int] = []
        while len(draft) < limit:
            children: dict[int, list[tuple[int, int]]] = {}
            for number, position in node:
                if position < len(texts[number]):
                    children.setdefault(texts[number][position], []).append((number, position + 1))
            if not children:
                break
            best = max(
                children,
                key=lambda token: (
                    max(sum(rewards[number] for number, _ in children[token]), 0.0),
                    len(children[token]),
                    max(children[token]),
                ),
            )
            draft.append(best)
            node = children[best]
        if draft:
            return Draft(draft, length)
    return Draft([], 0)


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(PIECES, CONTEXTS, st.integers(1, 7), st.integers(1, 7), st.integers(1, 20))
def test_draft_is_what_the_rules_say(
    pieces: list[Piece], context: list[int], bound: int, other_bound: int, limit: int
) -> None:
    prefix_min, prefix_max = sorted((bound, other_bound))
    index = DraftIndex.from_buffer(build_index(pieces))
    assert index.draft(context, prefix_max, prefix_min, limit) == oracle(pieces, context, prefix_max, prefix_min, limit)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(2, 60), st.integers(1, 4))
def test_repetitive_text_is_sorted_right(period: list[int], repeats: int, copies: int) -> None:
    """Many rounds of prefix doubling: long common prefixes within a piece and between pieces."""
    pieces = [Piece([], period * repeats + [2], reward) for reward in [1.0, 0.0, 0.5, 1.0][:copies]]
    index = DraftIndex.from_buffer(build_index(pieces))
    for start in range(len(period)):
        context = (period * 3)[start : start + 5]
        assert index.draft(context, 5, 1, 40) == oracle(pieces, context, 5, 1, 40)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(PIECES, CONTEXTS, st.integers(1, 20))
def test_confidence_is_what_the_counts_say(pieces: list[Piece], context: list[int], limit: int) -> None:
    found = DraftIndex.from_buffer(build_index(pieces)).draft(context, 7, 1, limit)
    texts = [[*piece.context, *piece.tokens] for piece in pieces]
    path = context[len(context) - found.match_length :]
    assert len(found.confidence) == len(found.tokens)
    expected = 1.0
    for token, confidence in zip(found.tokens, found.confidence, strict=True):
        count, child = (sum(occurrences(text, end) for text in texts) for end in (path, [*path, token]))
        expected *= (child + CONFIDENCE_A) / (count + CONFIDENCE_B)
        expected *= SHORT_MATCH_FACTOR if len(path) < SURE_MATCH else 1
        assert confidence == pytest.approx(expected, rel=1e-5)
        path = [*path, token]


def occurrences(text: list[int], part: list[int]) -> int:
    return sum(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


def test_readers_see_the_old_index_or_the_new_one(tmp_path: Path) -> None:
    """A file that is written in place while it is read is refused; one that is replaced is one of the two."""
    indexes = [build_index([Piece([1, 2, 3], [4] * 3000, 1.0)]), build_index([Piece([1, 2, 3], [5] * 3000, 1.0)])]
    path = tmp_path / "index"
    indexes[0].tofile(path)
    stop = threading.Event()

    def publish() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            if number % 3:
                indexes[number % 2].tofile(tmp_path / "next")
                (tmp_path / "next").replace(path)
            else:
                with path.open("r+b") as file:
                    file.write(indexes[number % 2].tobytes())

    writer = threading.Thread(target=publish)
    writer.start()
    whole = 0
    try:
        for _ in range(300):
            try:
                # Read, not mapped: what is written in place after the check is beyond any reader.
                found = DraftIndex.from_buffer(path.read_bytes()).draft([1, 2, 3], 7, 3, 8).tokens
            except IndexBufferError:
                continue
            whole += 1
            assert found in ([4] * 8, [5] * 8)
    finally:
        stop.set()
        writer.join()
    assert whole


def draft(pieces: list[Piece], context: list[int], limit: int = 8) -> list[int]:
    return DraftIndex.from_buffer(build_index(pieces)).draft(context, 7, 3, limit).tokens


def test_the_rewarded_branch_wins_over_the_frequent_one() -> None:
    failed = Piece([1, 2, 3], [4, 5], 0.0)
    assert draft([failed, failed, Piece([1, 2, 3], [6, 7], 1.0), failed], [1, 2, 3]) == [6, 7]


def test_without_a_positive_reward_the_frequent_branch_wins() -> None:
    failed = Piece([1, 2, 3], [4, 5], -1.0)
    rare = Piece([1, 2, 3], [6, 7], -0.1)
    assert draft([failed, failed, rare], [1, 2, 3]) == [4, 5]


def test_with_equal_rewards_and_counts_the_last_piece_wins() -> None:
    first, last = Piece([1, 2, 3], [9, 4], 0.5), Piece([1, 2, 3], [5, 4], 0.5)
    assert draft([first, last], [1, 2, 3]) == [5, 4]
    assert draft([last, first], [1, 2, 3]) == [9, 4]


def test_sums_of_rewards_without_exact_binary_form_tie_exactly() -> None:
    """0.1 + 0.2 + 0.3 in any order: the tie must go to recency and not to a rounding error."""
    rewards = [0.1, 0.2, 0.3]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        pieces = [Piece([1, 2, 3], [9], rewards[i]) for i in order] + [Piece([1, 2, 3], [5], r) for r in rewards]
        noise = [Piece([], [0, 1], 1e3 / 3)] * 5
        assert draft(noise + pieces, [1, 2, 3]) == [5]
        assert draft(noise + pieces[::-1], [1, 2, 3]) == [9]


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_rewards_of_any_size_compare(scale: float) -> None:
    good, bad = Piece([1, 2, 3], [9], scale), Piece([1, 2, 3], [5], scale / 2)
    assert draft([good, bad], [1, 2, 3]) == [9]


def test_a_response_can_be_drafted_from_its_very_start() -> None:
    assert draft([Piece([7, 8, 9], [1, 2, 3, 4], 1.0)], [5, 7, 8, 9], limit=3) == [1, 2, 3]


def test_a_draft_never_leaves_its_piece() -> None:
    assert draft([Piece([], [1, 2, 3, 4], 1.0), Piece([], [5, 6], 1.0)], [1, 2, 3], limit=32) == [4]


def test_placeholders_match_nothing() -> None:
    pieces = [Piece([], [1, 2, 3], 1.0), Piece([], [1, 2, 3], 1.0)]
    index = DraftIndex.from_buffer(build_index(pieces))
    assert index.draft([2, 3, -1], 3, 1, 4) == Draft([], 0)
    assert index.draft([-1, 1, 2], 3, 1, 4) == Draft([3], 2)


def test_the_largest_token_id_is_kept() -> None:
    largest = 2**31 - 1
    assert draft([Piece([], [1, 2, 3, largest, largest, 0], 1.0)], [1, 2, 3]) == [largest, largest, 0]


@pytest.mark.parametrize("tokens", [[-1], [2**31], [0.5], [[1], [2]], ["a"]])
def test_what_is_no_token_is_refused(tokens: list) -> None:
    with pytest.raises(ValueError, match="token"):
        build_index([Piece([], tokens, 0.0)])


@pytest.mark.parametrize("bounds", [(3, 0), (2, 3)])
def test_impossible_prefix_bounds_are_refused(bounds: tuple[int, int]) -> None:
    index = DraftIndex.from_buffer(build_index([]))
    with pytest.raises(ValueError, match="prefix_min"):
        index.draft([1], *bounds, 1)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=4), st.integers(1, 9))
def test_large_nodes_are_searched_right(branches: list[tuple[int, int]], shortest: int) -> None:
    """More suffixes at a node, and more tokens before it, than are looked at one by one."""
    long = [0, 1] * 150
    pieces = [
        Piece(long, [token, token, other, *long[:20]], [1.0, 0.0, 0.25, -1.0][other])
        for token, other in branches
        for _ in range(LOOKED_AT // 2)
    ]
    index = DraftIndex.from_buffer(build_index(pieces))
    for context in ([0, 1, 0], long, [*long, 0], [*long, branches[0][0]], [1], [2, 0, 1]):
        least = min(shortest, len(context))
        assert index.draft(context, 300, least, 30) == oracle(pieces, context, 300, least, 30)


def test_more_responses_than_grades_are_refused() -> None:
    with pytest.raises(ValueError, match="65536 responses"):
        build_index([Piece([], [], 0.0)] * (2**16 + 1))


def test_no_limit_no_draft() -> None:
    assert DraftIndex.from_buffer(build_index([Piece([], [1, 2], 1.0)])).draft([1], 1, 1, 0) == Draft([], 0)


def example() -> tuple[np.ndarray, Draft]:
    return build_index([Piece([1, 2, 3], [4, 5, 6], 1.0), Piece([1, 2, 3], [4, 7], 0.0)]), Draft([4, 5, 6], 3)


def test_every_kind_of_buffer_opens(tmp_path: Path) -> None:
    buffer, expected = example()
    path = tmp_path / "index"
    path.write_bytes(buffer.tobytes())
    shifted = memoryview(b"x" + buffer.tobytes())[1:]  # not aligned to 8 bytes
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    for kind in (buffer, buffer.tobytes(), bytearray(buffer), memoryview(buffer), shifted, mapped):
        assert DraftIndex.from_buffer(kind).draft([1, 2, 3], 7, 3, 8) == expected


def test_opening_copies_nothing() -> None:
    """What is changed in the buffer afterwards is what is drafted."""
    buffer, _ = example()
    index = DraftIndex.from_buffer(buffer)
    tokens = buffer.view(np.int32)
    tokens[tokens == 4] = 9
    assert index.draft([1, 2, 3], 7, 3, 8).tokens[0] == 9


def test_the_same_pieces_make_the_same_bytes() -> None:
    assert example()[0].tobytes() == example()[0].tobytes()


def test_every_changed_byte_is_noticed() -> None:
    buffer, _ = example()
    for position in range(buffer.size):
        damaged = buffer.copy()
        damaged[position] ^= 0x10
        with pytest.raises(IndexBufferError):
            DraftIndex.from_buffer(damaged)


def test_every_other_length_is_noticed() -> None:
    raw = example()[0].tobytes()
    for length in range(len(raw)):
        with pytest.raises(IndexBufferError):
            DraftIndex.from_buffer(raw[:length])
    with pytest.raises(IndexBufferError, match="torn"):
        DraftIndex.from_buffer(raw + b"\0")


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, VERSION + 1])
def test_another_version_is_named(version: int) -> None:
    raw = bytearray(example()[0])
    raw[8:12] = struct.pack("<I", version)
    with pytest.raises(IndexBufferError, match=f"version {version}, this code reads versions 3 to 4"):
        DraftIndex.from_buffer(raw)


def test_an_index_from_before_there_were_earlier_runs_is_read() -> None:
    """Version 3 has zeros where this run's own pieces begin, and nothing else differs."""
    buffer, expected = example()
    raw = bytearray(buffer)
    raw[8:12] = struct.pack("<I", OLDEST_VERSION)
    assert not any(raw[32:56])
    raw[CHECKSUM_AT:HEADER_BYTES] = CHECKSUM.pack(_checksum(np.frombuffer(bytes(raw), np.uint8)))
    assert DraftIndex.from_buffer(raw).draft([1, 2, 3], 7, 3, 8) == expected


def draft_seconds(responses: int, tokens: list[int]) -> float:
    """Return the processor time of a draft, at best."""
    index = DraftIndex.from_buffer(build_index([Piece([], tokens, 1.0)] * responses)).compiled
    end, taken = np.array(tokens[:16], np.int32), []
    for _ in range(5):
        began = time.process_time()
        index.draft(end, 16, 2, 32, 50)
        taken.append(time.process_time() - began)
    return min(taken)


def test_responses_of_one_token_cost_no_more_where_there_are_many_of_them() -> None:
    """A policy may collapse. Here 128 times as many responses took 30 times as long, and now twice at most."""
    assert draft_seconds(4096, [5] * 33) < 8 * draft_seconds(32, [5] * 33)


@pytest.mark.parametrize("thing", ["text", None, 3, np.zeros(256, dtype=np.uint8)[::2], b"", bytes(100)])
def test_what_is_no_index_is_refused(thing: object) -> None:
    with pytest.raises(IndexBufferError):
        DraftIndex.from_buffer(thing)


@pytest.mark.parametrize("text", [[0] * 32768, [1, 2, 3, 1, 2, 4] * 5461], ids=["one token", "period 6"])
def test_repetitive_responses_build_in_time(text: list[int]) -> None:
    """Comparing such suffixes one by one would take minutes; 5 s is a hundred times what it takes here."""
    pieces = [Piece([7, 8, 9], np.array(text, dtype=np.int32), 1.0)] * 4
    build_index(pieces[:1])
    started = time.process_time()
    buffer = build_index(pieces)
    assert time.process_time() - started < 5
    assert buffer.size <= 24 * 4 * len(text)
    assert DraftIndex.from_buffer(buffer).draft([7, 8, 9], 7, 3, 32).tokens == text[:32]
