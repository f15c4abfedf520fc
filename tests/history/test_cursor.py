"""A cursor finds what a search finds, however the sample goes on."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from tests.examples import examples

TOKENS = st.lists(st.integers(0, 2), max_size=30)
PIECES = st.lists(st.builds(Piece, st.lists(st.integers(0, 2), max_size=3), TOKENS, st.just(1.0)), max_size=5)
# A sample's next tokens: its own (-1: a placeholder), or a number of tokens of the history's continuation and one more.
OWN = st.lists(st.integers(-1, 3), max_size=4)
PARTS = st.lists(st.tuples(OWN, st.integers(0, 6), st.integers(0, 3)), max_size=12)


def check(pieces: list[Piece], parts: list[tuple[list[int], int, int]], longest: int, least: list[int]) -> int:
    """Grow a text by the parts; returns how often there was a match."""
    index = DraftIndex.from_buffer(build_index(pieces)).compiled
    stored = [token for number, piece in enumerate(pieces) for token in [*piece.context, *piece.tokens, -1 - number]]
    cursor = core.Cursor()
    text: list[int] = []
    found = 0
    for number, (own, going_on, where) in enumerate(parts):
        text += own
        if cursor.length:
            ahead = stored[cursor.at : cursor.at + going_on]
            text += [*(token for token in ahead if token >= 0), where]
        array = np.array(text, dtype=np.int32)
        bound = min(longest, least[number % len(least)])
        low, high, length, place = cursor.follow(index, array, longest, bound)
        assert (low, high, length) == index.longest_match(array, longest, bound)
        assert low <= place < high or not length
        if length:
            found += 1
            cursor.move_to(index, low + where % (high - low))
    return found


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(PIECES, PARTS, st.integers(1, 8), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_it_finds_what_a_search_finds(
    pieces: list[Piece], parts: list[tuple[list[int], int, int]], longest: int, least: list[int]
) -> None:
    check(pieces, parts, longest, least)


def test_it_finds_what_a_search_finds_in_much_text() -> None:
    """Nodes of hundreds of suffixes, and texts that follow the history for long, leave it and come back."""
    random = np.random.default_rng(0)
    base = random.integers(0, 4, 300)
    pieces = []
    for _ in range(100):
        changed = base.copy()
        changed[random.integers(0, 300, 3)] = random.integers(0, 5, 3)
        pieces.append(Piece([1, 2, 3], changed, 1.0))
    parts = [
        (random.integers(0, 5, random.integers(0, 2)).tolist(), int(random.integers(0, 20)), int(random.integers(0, 4)))
        for _ in range(300)
    ]
    assert check(pieces, [([1, 2, 3], 0, 0), *parts], 16, [2]) > 200
