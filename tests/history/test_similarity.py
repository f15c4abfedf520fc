"""The routine of RhymeRL's section 5.1, by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from rhyme_openrlhf.history.similarity import Similarity


@pytest.mark.parametrize(
    ("response", "earlier", "stretches"),
    [
        # After 1 2 3: 4 5 6 of the second text, which is longer. Then 4 5 6 was followed by 0, so 7 is generated.
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 9], [[1, 2, 3, 4, 9], [1, 2, 3, 4, 5, 6, 0]], [3, 2]),
        ([1, 2], [[1, 2, 3]], []),
        ([1, 2, 3, 4], [[2, 3, 4, 5]], []),
        ([5, 5, 5, 5, 5], [[5, 5, 5, 5]], [1, 1]),
    ],
)
def test_the_longest_identical_stretch_is_accepted(
    response: list[int], earlier: list[list[int]], stretches: list[int]
) -> None:
    found = Similarity()
    found.add([response, []], earlier)
    assert found.hits == Counter(stretches)
    assert (found.accepted, found.tokens) == (sum(stretches), len(response))
    assert found.shares == [found.share] == [sum(stretches) / len(response)]
