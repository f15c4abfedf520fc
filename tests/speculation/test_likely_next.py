"""What mostly followed a token: against counting, in tables that are crowded too."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.speculation.likely_next import SLOT, likely_next, slot_of, vote

TEXTS = st.lists(st.lists(st.integers(0, 3) | st.integers(2**31 - 4, 2**31 - 1), max_size=60), max_size=4)


@settings(deadline=None, derandomize=True)
@given(TEXTS, st.sampled_from([1, 2, 1024]))
def test_the_majority_is_found_and_nothing_that_never_followed(texts: list[list[int]], slots: int) -> None:
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
        rivals = sum(n for (first, _), n in followed.items() if slot_of(slots, first) == slot_of(slots, token))
        if after and 2 * max(after.values()) > rivals:
            assert found == after.most_common(1)[0][0]


def test_a_token_that_was_never_seen_has_no_follower() -> None:
    table = np.zeros(SLOT * 4, dtype=np.int64)
    assert likely_next(table.ctypes.data, 4, 0) == -1
    vote(table.ctypes.data, 4, 7, 8)
    assert [likely_next(table.ctypes.data, 4, token) for token in (7, 8)] == [8, -1]
