"""What mostly followed a token lately: against looking through the texts, in tables that are crowded too."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.speculation.likely_next import MOST_VOTES, SLOT, likely_next, slot_of, vote

TEXTS = st.lists(st.lists(st.integers(0, 3) | st.integers(2**31 - 4, 2**31 - 1), max_size=60), max_size=4)


@settings(deadline=None, derandomize=True)
@given(TEXTS, st.sampled_from([1, 2, 1024]))
def test_what_is_said_lately_is_found_and_nothing_that_never_followed(texts: list[list[int]], slots: int) -> None:
    table = np.zeros(SLOT * slots, dtype=np.int64)
    followed: Counter[tuple[int, int]] = Counter()
    for text in texts:
        for token, then in zip(text, text[1:], strict=False):
            vote(table.ctypes.data, slots, token, then)
        followed.update(zip(text, text[1:], strict=False))
    for token in {token for text in texts for token in text}:
        after = Counter({then: count for (first, then), count in followed.items() if first == token})
        found = likely_next(table.ctypes.data, slots, token)
        assert found == -1 or found in after
        pairs = [pair for text in texts for pair in itertools.pairwise(text)]
        in_slot = [pair for pair in pairs if slot_of(slots, pair[0]) == slot_of(slots, token)]
        # Whatever was there before, after so many of one pair it is that one.
        last = in_slot[-2 * MOST_VOTES :]
        if after and (len(set(in_slot)) == 1 or (len(last) == 2 * MOST_VOTES and len(set(last)) == 1)):
            assert found == (last[-1][1] if last[-1][0] == token else -1)


def test_the_majority_of_what_is_said_lately_is_found() -> None:
    table = np.zeros(SLOT, dtype=np.int64)
    for then in (8, 9, 8, 8, 9, 8):
        vote(table.ctypes.data, 1, 7, then)
    assert likely_next(table.ctypes.data, 1, 7) == 8
    for _ in range(100):
        vote(table.ctypes.data, 1, 7, 8)
    for _ in range(MOST_VOTES):
        vote(table.ctypes.data, 1, 7, 9)
    assert likely_next(table.ctypes.data, 1, 7) == 8
    vote(table.ctypes.data, 1, 7, 9)
    assert likely_next(table.ctypes.data, 1, 7) == 9


def test_a_token_that_was_never_seen_has_no_follower() -> None:
    table = np.zeros(SLOT * 4, dtype=np.int64)
    assert likely_next(table.ctypes.data, 4, 0) == -1
    vote(table.ctypes.data, 4, 7, 8)
    assert [likely_next(table.ctypes.data, 4, token) for token in (7, 8)] == [8, -1]
