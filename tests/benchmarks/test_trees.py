"""Draft trees and chains by hand and at random: what each accepts, and how both are made of earlier texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from trees import SIZES, Texts, chain_of, response_places, tree_of, walk

texts = st.lists(st.lists(st.integers(1, 3), min_size=3, max_size=20), min_size=1, max_size=6)


def test_a_tree_hedges_where_a_chain_must_choose() -> None:
    # After 1 2: three times 3 4 5, twice 6 7 8.
    earlier = Texts([[1, 2, 3, 4, 5]] * 3 + [[1, 2, 6, 7, 8]] * 2)
    places = earlier.occurrences([1, 2], 1)
    assert len(places) == 5
    # Four nodes: 3, 4, 5 (weight three each), then 6.
    assert tree_of(earlier, places, [3, 4, 5])[0] == 3 and tree_of(earlier, places, [6, 7, 8])[0] == 1
    assert tree_of(earlier, places, [6, 7, 8])[1] == 3
    assert chain_of(earlier, places, [3, 4, 5])[0] == 3 and chain_of(earlier, places, [6, 7, 8]) == (0,) * len(SIZES)


def test_the_longest_match_counts_unless_it_is_too_rare() -> None:
    earlier = Texts([[9, 1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2, 4]])
    assert earlier.occurrences([9, 1, 2], 1) == [(0, 3)]
    assert len(earlier.occurrences([9, 1, 2], 4)) == 4
    assert earlier.occurrences([7, 8], 1) == []


@given(texts, st.lists(st.integers(1, 3), max_size=10))
def test_both_accept_prefixes_and_more_with_more_tokens(earlier: list[list[int]], answer: list[int]) -> None:
    known = Texts(earlier)
    places = known.occurrences(earlier[0][:2], 1)
    for accepted in (tree_of(known, places, answer), chain_of(known, places, answer)):
        assert len(accepted) == len(SIZES) and list(accepted) == sorted(accepted)
        assert all(got <= min(size, len(answer)) for got, size in zip(accepted, SIZES, strict=True))
    # Without a branch the two are the same.
    if len({tuple(known.texts[number][end:]) for number, end in places}) == 1:
        assert tree_of(known, places, answer) == chain_of(known, places, answer)


def test_a_place_knows_nothing_of_what_follows() -> None:
    response = [5, 6, 5, 6, 5, 6, 7]
    found = list(response_places([], [1, 2], response))
    assert len(found) == len(response) - 1
    # From the second 5 6 on, the sample's own text continues the pattern; its end is no token to draft.
    assert [one[1].chain[-1] for one in found] == [0, 0, 0, 2, 1, 0]
    assert found[0][1].tree == found[0][1].chain == (0,) * len(SIZES)


def test_a_walk_takes_a_token_more_than_are_accepted() -> None:
    assert walk([0, 0, 0]) == 3 and walk([2, 0, 0]) == 1 and walk([1, 0, 0]) == 2 and walk([]) == 0
