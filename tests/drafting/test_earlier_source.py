"""Drafts that only earlier runs' responses have are a source of their own; what both have is this run's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.drafter import FROM_EARLIER, FROM_HISTORY, SOURCE_NAMES, HistoryDrafter, Verified
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.examples import examples

TEXT = list(range(40))
OTHER = [*range(10), *range(100, 130)]
TOKENS = st.lists(st.integers(0, 2), max_size=14)


def pieces_of(*texts: list[int], reward: float = 0.0) -> list[Piece]:
    return [Piece([], text, reward) for text in texts]


def source_of(buffer: np.ndarray, text: list[int]) -> int:
    drafter = HistoryDrafter(HistoSpecSettings())
    drafter.install("p", buffer)
    drafter.start("r", "p", text, 1, 1000)
    return int(drafter.drafts_of(["r"], True).sources[0])


def test_the_source_is_the_run_that_has_the_draft() -> None:
    mixed = build_index([*pieces_of(TEXT), *pieces_of(OTHER)], 1)
    # The beginning is in both; behind it each goes its own way.
    assert source_of(mixed, TEXT[:20]) == FROM_EARLIER
    assert source_of(mixed, OTHER[:20]) == FROM_HISTORY
    assert source_of(build_index(pieces_of(TEXT, TEXT), 1), TEXT[:20]) == FROM_HISTORY
    assert source_of(build_index(pieces_of(TEXT), 1), TEXT[:20]) == FROM_EARLIER
    assert source_of(build_index(pieces_of(TEXT)), TEXT[:20]) == FROM_HISTORY


def test_an_accepted_draft_counts_for_its_source() -> None:
    drafter = HistoryDrafter(HistoSpecSettings())
    drafter.install("p", build_index(pieces_of(TEXT), 1))
    drafter.start("r", "p", TEXT[:5], 1, 1000)
    (draft,) = drafter.draft(["r"])
    came = drafter.verified(Verified.of(["r"], [len(draft)], [len(draft)]))
    assert dict(zip(SOURCE_NAMES, came.accepted, strict=True))["earlier"] == len(draft) > 0


def test_where_they_disagree_own_rewarded_responses_win() -> None:
    """However many earlier ones there are: they have no reward (history/earlier.py)."""
    earlier = pieces_of(*[TEXT] * 20)
    index = DraftIndex.from_buffer(build_index([*earlier, *pieces_of(OTHER, reward=0.1)], 20))
    assert index.draft(TEXT[:10], 16, 2, 3).tokens == OTHER[10:13]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(TOKENS, max_size=4), st.lists(TOKENS, max_size=4), TOKENS)
def test_who_is_earlier_changes_no_draft(before: list[list[int]], own: list[list[int]], context: list[int]) -> None:
    pieces = pieces_of(*before, *own)
    plain, marked = (DraftIndex.from_buffer(build_index(pieces, count)) for count in (0, len(before)))
    assert plain.draft(context, 7, 2, 8) == marked.draft(context, 7, 2, 8)


def test_more_earlier_pieces_than_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="more tokens or pieces"):
        build_index(pieces_of(TEXT), 2)
    for count in (-1, 1000):
        buffer = build_index(pieces_of(TEXT), 1).copy()
        buffer[32:40] = np.frombuffer(np.int64(count).tobytes(), np.uint8)
        with pytest.raises(core.BufferError, match="torn"):
            core.Index(buffer)
