"""The drafter: whose index, how many tokens, and what it counts."""

from __future__ import annotations

from typing import Any

import pytest

from rhyme_openrlhf.drafting.drafter import NO_SOURCE, SOURCE_NAMES
from rhyme_openrlhf.drafting.source import Verified
from rhyme_openrlhf.history.index import IndexBufferError, Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.drafting.planners import planner
from tests.drafting.whole_texts import WholeTexts

RESPONSE = list(range(10, 60))
INDEX = build_index([Piece([1, 2, 3], RESPONSE, 1.0)])
OTHER = build_index([Piece([1, 2, 3], [7, 8, 9], 1.0)])
PROMPT = 3
FAR = 1000


def settings(**changes: Any) -> HistoSpecSettings:
    """History alone, and the window alone says how long a draft is; but for `changes`."""
    alone: dict[str, Any] = {
        "prefix_min": 3, "own_output": False, "siblings": False, "shared_tokens": 0, "extend_confidence": 1.0,
        "stop_confidence": 0.0,
    }  # fmt: skip
    return HistoSpecSettings(**(alone | changes))


@pytest.fixture
def drafter() -> WholeTexts:
    return WholeTexts(settings())


def start(
    drafter: WholeTexts, request: str, key: str | None, window: int | None = None, most_tokens: int = FAR
) -> None:
    drafter.begin(request, key, PROMPT, most_tokens, window)


def draft(drafter: WholeTexts, request: str, tokens: list[int]) -> list[int]:
    return drafter.draft_for([request], [tokens])[0]


def verify(drafter: WholeTexts, request: str, drafted: int, accepted: int) -> str:
    return SOURCE_NAMES[drafter.verified(Verified.of([request], [drafted], [accepted])).sources[0]]


def test_a_draft_is_as_long_as_the_window_and_the_room_allow(drafter: WholeTexts) -> None:
    drafter.install("p", INDEX)
    start(drafter, "a", "p", window=6)
    assert draft(drafter, "a", [0, 1, 2, 3]) == RESPONSE[:6]
    for room, name in ((4, "four"), (0, "none"), (-1, "over")):
        start(drafter, name, "p", window=6, most_tokens=4 + room + 1)
        assert draft(drafter, name, [0, 1, 2, 3]) == RESPONSE[: max(room, 0)]


def test_a_whole_response_is_replayed(drafter: WholeTexts) -> None:
    """Every draft is accepted, so the window grows 2, 4, 6, ... and one more token comes free with each step."""
    drafter.install("p", INDEX)
    start(drafter, "a", "p")
    tokens, drafted, drafts = [1, 2, 3], 0, 0
    target = [1, 2, 3, *RESPONSE]
    while len(tokens) < len(target):
        found = draft(drafter, "a", tokens)
        assert verify(drafter, "a", len(found), len(found)) == "history"
        drafted, drafts = drafted + len(found), drafts + 1
        tokens = tokens + found
        assert tokens == target[: len(tokens)]
        tokens = target[: len(tokens) + 1]
    assert drafter.window("a") == 2 + 2 * drafts
    assert drafts == 7 and drafted < len(RESPONSE)


def test_without_index_or_key_or_match_there_is_no_draft(drafter: WholeTexts) -> None:
    drafter.install("p", INDEX)
    start(drafter, "keyless", None)
    start(drafter, "unknown", "q")
    start(drafter, "known", "p")
    assert draft(drafter, "keyless", [1, 2, 3]) == []
    assert draft(drafter, "unknown", [1, 2, 3]) == []
    assert draft(drafter, "known", []) == []
    assert draft(drafter, "known", [3, 2, 1]) == []
    assert drafter.draft_for([], []) == []
    # Dummy drafts that a measurement of step times gave them.
    both = drafter.verified(Verified.of(["keyless", "known"], [2, 2], [1, 0]))
    assert both.sources.tolist() == [NO_SOURCE, NO_SOURCE] and sum(both.accepted) == 1


def test_an_index_may_come_late_be_replaced_and_forgotten(drafter: WholeTexts) -> None:
    start(drafter, "a", "p")
    assert draft(drafter, "a", [1, 2, 3]) == []
    drafter.install("p", INDEX)
    assert draft(drafter, "a", [1, 2, 3]) == [10, 11]
    drafter.install("p", OTHER)
    assert draft(drafter, "a", [1, 2, 3]) == [7, 8]
    drafter.forget("p")
    drafter.forget("p")
    assert draft(drafter, "a", [1, 2, 3]) == []


def test_a_bad_index_is_refused_and_the_old_one_kept(drafter: WholeTexts) -> None:
    drafter.install("p", INDEX)
    start(drafter, "a", "p")
    with pytest.raises(IndexBufferError):
        drafter.install("p", OTHER[:-1])
    assert draft(drafter, "a", [1, 2, 3]) == [10, 11]


def test_samples_have_windows_of_their_own(drafter: WholeTexts) -> None:
    drafter.install("p", INDEX)
    start(drafter, "a", "p")
    start(drafter, "b", "p")
    verify(drafter, "a", 2, 2)
    verify(drafter, "b", 2, 1)
    assert len(draft(drafter, "a", [1, 2, 3])) == 4
    assert len(draft(drafter, "b", [1, 2, 3])) == 2
    assert (drafter.window("a"), drafter.window("b")) == (4, 2)


def test_a_moved_sample_keeps_its_window(drafter: WholeTexts) -> None:
    start(drafter, "a", "p")
    verify(drafter, "a", 2, 2)
    other = WholeTexts(settings(own_output=True))
    other.install("p", INDEX)
    start(other, "a", "p", window=drafter.window("a"))
    assert len(draft(other, "a", [1, 2, 3])) == 4


def test_prefix_bounds_come_from_the_settings() -> None:
    drafter = WholeTexts(settings(prefix_min=1, prefix_max=2))
    drafter.install("p", INDEX)
    start(drafter, "a", "p")
    assert draft(drafter, "a", [5, 3]) == [10, 11]


def test_unknown_and_repeated_requests_are_errors(drafter: WholeTexts) -> None:
    start(drafter, "a", "p")
    with pytest.raises(ValueError, match="started already"):
        start(drafter, "a", "p")
    drafter.finish("a")
    for call in (lambda: draft(drafter, "a", [1]), lambda: verify(drafter, "a", 1, 1), lambda: drafter.finish("a")):
        with pytest.raises(KeyError, match="request a"):
            call()


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1), (0, 0), (-1, -1)])
def test_impossible_counts_are_refused(drafter: WholeTexts, drafted: int, accepted: int) -> None:
    start(drafter, "a", "p", window=6)
    with pytest.raises(ValueError, match="accepted"):
        verify(drafter, "a", drafted, accepted)
    assert drafter.window("a") == 6


@pytest.mark.parametrize("siblings", [True, False])
def test_the_source_that_was_right_more_often_drafts(siblings: bool) -> None:
    """Where samples may depend on each other; without siblings they draft as if they were alone."""
    drafter = WholeTexts(settings(own_output=True, siblings=siblings))
    drafter.install("p", INDEX)
    drafter.install("q", INDEX)
    start(drafter, "a", "p")
    start(drafter, "b", "q")
    text = [0, 1, 2, 3, 90, 91, 0, 1, 2, 3]
    assert draft(drafter, "a", text) == [10, 11]
    for _ in range(20):
        assert verify(drafter, "a", 2, 0) == "history"
    assert draft(drafter, "b", text) == ([90, 91] if siblings else [10, 11])
    assert verify(drafter, "b", 2, 2) == ("own" if siblings else "history")


def test_without_history_a_sample_drafts_from_itself() -> None:
    drafter = WholeTexts(settings(own_output=True))
    start(drafter, "a", "p", window=4)
    tokens = [5, 6, 7, 8, 9]
    assert draft(drafter, "a", tokens) == []
    assert draft(drafter, "a", [*tokens, 5, 6, 7]) == [8, 9, 5, 6]
    start(drafter, "keyless", None)
    assert draft(drafter, "keyless", [*tokens, 5, 6, 7]) == []


def test_samples_of_one_prompt_draft_from_each_other() -> None:
    drafter = WholeTexts(settings(siblings=True))
    for request in "ab":
        start(drafter, request, "p")
    start(drafter, "stranger", "q")
    first, second = [1, 2, 3, 50, 51, 52, 53, 54], [1, 2, 3, 50]
    drafts = drafter.draft_for(["a", "b", "stranger"], [first, second, second])
    assert drafts == [[], [51, 52], []]
    assert verify(drafter, "b", 2, 2) == "siblings"
    # It follows what it matched, up to where the other is; a finished one is still there.
    assert draft(drafter, "b", [*second, 51, 52, 53]) == [54]
    drafter.finish("a")
    assert draft(drafter, "b", [*second, 51, 52, 53, 9, 50, 51, 52]) == [53, 54]
    # And from its very start.
    start(drafter, "c", "p")
    assert draft(drafter, "c", [1, 2, 3]) == [50, 51]


def test_siblings_are_forgotten_when_the_last_has_finished() -> None:
    drafter = WholeTexts(settings(siblings=True))
    drafter.install("p", OTHER)
    for turn in range(2):
        start(drafter, "a", "p")
        start(drafter, "b", "p")
        assert draft(drafter, "b", [1, 2, 3, 50, 51]) == []
        assert draft(drafter, "a", [1, 2, 3, 50, 51, 52, 53]) == []
        assert draft(drafter, "b", [1, 2, 3, 50, 51, 52]) == [53]
        drafter.finish("a")
        drafter.finish("b")
        start(drafter, f"next {turn}", "p")
        assert draft(drafter, f"next {turn}", [1, 2, 3, 50, 51, 52]) == []
        drafter.finish(f"next {turn}")


def test_history_before_siblings_before_own_text() -> None:
    drafter = WholeTexts(settings(siblings=True, own_output=True))
    start(drafter, "a", "p")
    start(drafter, "b", "p")
    assert draft(drafter, "a", [1, 2, 3, 50, 51, 52, 60, 61]) == []
    text = [1, 2, 3, 7, 50, 51, 52, 80, 81, 82, 83, 9]
    assert draft(drafter, "b", text) == []
    assert draft(drafter, "b", [*text, 50, 51, 52]) == [60, 61]
    assert verify(drafter, "b", 2, 0) == "siblings"
    # Four of its own against three.
    assert draft(drafter, "b", [*text, 50, 51, 52, 90, 7, 50, 51, 52]) == [80, 81]
    drafter.install("p", build_index([Piece([], [50, 51, 52, 70, 71], 1.0)]))
    assert draft(drafter, "b", [*text, 50, 51, 52, 90, 7, 50, 51, 52, 91, 50, 51, 52]) == [70, 71]


def test_a_certain_draft_goes_past_the_window_and_a_doubtful_one_ends_in_it() -> None:
    certain = WholeTexts(settings(extend_confidence=0.3))
    certain.install("p", build_index([Piece([1, 2, 3], RESPONSE, 1.0)] * 16))
    start(certain, "a", "p")
    found = draft(certain, "a", [1, 2, 3])
    assert 2 < len(found) <= 32 and found == RESPONSE[: len(found)]
    start(certain, "b", "p", most_tokens=3 + 4 + 1)
    assert draft(certain, "b", [1, 2, 3]) == RESPONSE[:4]
    doubtful = WholeTexts(settings(stop_confidence=0.6))
    split = [Piece([1, 2, 3], [10, 11, *tail], 1.0) for tail in ([20], [30], [40])]
    doubtful.install("p", build_index(split))
    start(doubtful, "a", "p", window=8)
    assert draft(doubtful, "a", [1, 2, 3]) == [10, 11]


def planned(ms_a_row: float) -> WholeTexts:
    drafter = WholeTexts(settings(stop_confidence=0.99))
    drafter.install("p", INDEX)
    drafter.planner = planner(ms_a_row)
    return drafter


def test_a_planner_cuts_drafts_in_place_of_window_and_fixed_rules() -> None:
    drafter = planned(0.0)
    start(drafter, "a", "p", window=6, most_tokens=4 + 9 + 1)
    # Nothing is as certain as that, so the fixed rule would stop after one token; and the window is 6.
    assert drafter.draft_for(["a"], [[0, 1, 2, 3]], 4, FAR) == [RESPONSE[:9]]
    assert drafter.decision is not None and (drafter.decision.running, drafter.decision.drafts) == (1, 9)
    dear = planned(50.0)
    start(dear, "a", "p", window=6)
    assert dear.draft_for(["a"], [[0, 1, 2, 3]], 4, FAR) == [[]]


def test_a_planner_learns_from_what_was_verified_whoever_finishes_meanwhile() -> None:
    drafter = planned(3.0)
    lengths = []
    for number in range(200):
        names = (f"a{number}", f"b{number}")
        for name in names:
            start(drafter, name, "p", window=8)
        drafts = drafter.draft_for(names, [[0, 1, 2, 3]] * 2, 8, FAR)
        lengths.append(sum(map(len, drafts)))
        drafted = {name: len(found) for name, found in zip(names, drafts, strict=True) if found}
        drafter.verified(Verified.of([*drafted], [*drafted.values()], [0] * len(drafted)))
        drafter.finish(names[0])
        drafter.draft_for(names[1:], [[0, 1, 2, 3, 9]], 5, FAR)
        drafter.finish(names[1])
    assert lengths[-1] < lengths[0]
