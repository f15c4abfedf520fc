"""The drafter: whose index, how many tokens, and what it counts."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.history.index import IndexBufferError, Piece, build_index
from rhyme_openrlhf.speculation.drafter import DrafterCounters, HistoryDrafter, SampleSpeculation

RESPONSE = list(range(10, 60))
INDEX = build_index([Piece([1, 2, 3], RESPONSE, 1.0)])
OTHER = build_index([Piece([1, 2, 3], [7, 8, 9], 1.0)])
ROOM = 100


@pytest.fixture
def drafter() -> HistoryDrafter:
    return HistoryDrafter(HistoSpecSettings(own_output=False))


def test_a_draft_is_as_long_as_the_window_and_the_room_allow(drafter: HistoryDrafter) -> None:
    drafter.install("p", INDEX)
    drafter.start("a", "p", window=6)
    assert drafter.draft("a", [0, 1, 2, 3], ROOM) == RESPONSE[:6]
    assert drafter.draft("a", [0, 1, 2, 3], 4) == RESPONSE[:4]
    assert drafter.draft("a", [0, 1, 2, 3], 0) == []
    assert drafter.draft("a", [0, 1, 2, 3], -1) == []
    assert drafter.counters() == DrafterCounters(lookups=2, matches=2)


def test_a_whole_response_is_replayed(drafter: HistoryDrafter) -> None:
    """Every draft is accepted, so the window grows 2, 4, 6, ... and one more token comes free with each step."""
    drafter.install("p", INDEX)
    drafter.start("a", "p")
    tokens, drafted, drafts = [1, 2, 3], 0, 0
    target = [1, 2, 3, *RESPONSE]
    while len(tokens) < len(target):
        draft = drafter.draft("a", tokens, ROOM)
        drafter.record("a", len(draft), len(draft))
        drafted, drafts = drafted + len(draft), drafts + 1
        tokens += draft
        assert tokens == target[: len(tokens)]
        tokens += target[len(tokens) : len(tokens) + 1]
    assert drafter.finish("a") == SampleSpeculation(drafted, drafted, drafts, 2 + 2 * drafts)
    assert drafts == 7


def test_without_index_or_key_or_match_there_is_no_draft(drafter: HistoryDrafter) -> None:
    drafter.install("p", INDEX)
    drafter.start("keyless", None)
    drafter.start("unknown", "q")
    drafter.start("known", "p")
    assert drafter.draft("keyless", [1, 2, 3], ROOM) == []
    assert drafter.draft("unknown", [1, 2, 3], ROOM) == []
    assert drafter.counters().lookups == 0
    assert drafter.draft("known", [3, 2, 1], ROOM) == []
    assert drafter.draft("known", [], ROOM) == []
    assert drafter.counters() == DrafterCounters(lookups=2)


def test_an_index_may_come_late_be_replaced_and_forgotten(drafter: HistoryDrafter) -> None:
    drafter.start("a", "p")
    assert drafter.draft("a", [1, 2, 3], ROOM) == []
    drafter.install("p", INDEX)
    assert drafter.draft("a", [1, 2, 3], ROOM) == [10, 11]
    drafter.install("p", OTHER)
    assert drafter.draft("a", [1, 2, 3], ROOM) == [7, 8]
    drafter.forget("p")
    drafter.forget("p")
    assert drafter.draft("a", [1, 2, 3], ROOM) == []


def test_a_bad_index_is_refused_and_the_old_one_kept(drafter: HistoryDrafter) -> None:
    drafter.install("p", INDEX)
    drafter.start("a", "p")
    with pytest.raises(IndexBufferError):
        drafter.install("p", OTHER[:-1])
    assert drafter.draft("a", [1, 2, 3], ROOM) == [10, 11]


def test_samples_have_windows_of_their_own(drafter: HistoryDrafter) -> None:
    drafter.install("p", INDEX)
    drafter.start("a", "p")
    drafter.start("b", "p")
    drafter.record("a", 2, 2)
    drafter.record("b", 2, 1)
    drafter.record("b", 0, 0)
    assert len(drafter.draft("a", [1, 2, 3], ROOM)) == 4
    assert len(drafter.draft("b", [1, 2, 3], ROOM)) == 2
    assert drafter.finish("a") == SampleSpeculation(drafted=2, accepted=2, drafts=1, window=4)
    assert drafter.finish("b") == SampleSpeculation(drafted=2, accepted=1, drafts=1, window=2)
    assert drafter.counters() == DrafterCounters(lookups=2, matches=2, drafted=4, accepted=3)


def test_a_moved_sample_keeps_its_window(drafter: HistoryDrafter) -> None:
    drafter.start("a", "p")
    drafter.record("a", 2, 2)
    other = HistoryDrafter(HistoSpecSettings())
    other.install("p", INDEX)
    other.start("a", "p", window=drafter.finish("a").window)
    assert len(other.draft("a", [1, 2, 3], ROOM)) == 4


def test_prefix_bounds_come_from_the_settings() -> None:
    drafter = HistoryDrafter(HistoSpecSettings(prefix_min=1, prefix_max=2))
    drafter.install("p", INDEX)
    drafter.start("a", "p")
    assert drafter.draft("a", [5, 3], ROOM) == [10, 11]


def test_unknown_and_repeated_requests_are_errors(drafter: HistoryDrafter) -> None:
    drafter.start("a", "p")
    with pytest.raises(ValueError, match="started already"):
        drafter.start("a", "p")
    drafter.finish("a")
    for call in (lambda: drafter.draft("a", [1], 1), lambda: drafter.record("a", 1, 1), lambda: drafter.finish("a")):
        with pytest.raises(KeyError, match="request a"):
            call()


def test_counters_are_a_copy(drafter: HistoryDrafter) -> None:
    drafter.counters().lookups = 9
    assert drafter.counters().lookups == 0


def test_the_longer_match_drafts() -> None:
    drafter = HistoryDrafter(HistoSpecSettings())
    drafter.install("p", INDEX)
    drafter.start("a", "p")
    # Both match three tokens: the history.
    assert drafter.draft("a", [1, 2, 3, 90, 91, 1, 2, 3], ROOM) == [10, 11]
    # Four of its own.
    drafter.start("b", "p")
    assert drafter.draft("b", [0, 1, 2, 3, 90, 91, 0, 1, 2, 3], ROOM) == [90, 91]
    assert drafter.counters().own == 1


def test_without_history_a_sample_drafts_from_itself() -> None:
    drafter = HistoryDrafter(HistoSpecSettings())
    drafter.start("a", "p", window=4)
    tokens = [5, 6, 7, 8, 9]
    assert drafter.draft("a", tokens, ROOM) == []
    assert drafter.draft("a", [*tokens, 5, 6, 7], ROOM) == [8, 9, 5, 6]
    drafter.start("keyless", None)
    assert drafter.draft("keyless", [*tokens, 5, 6, 7], ROOM) == []
