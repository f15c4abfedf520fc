"""The window's state machine (RhymeRL, section 5.4)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.drafter import HistoryDrafter, Verified
from rhyme_openrlhf.drafting.window import SpeculationWindow
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.examples import examples


def test_the_papers_numbers() -> None:
    """Starts at 2, grows by 2 up to 32, falls back to 2."""
    window = SpeculationWindow(HistoSpecSettings())
    sizes = []
    for _ in range(17):
        sizes.append(window.size)
        window.record(window.size, window.size)
    assert sizes == [*range(2, 33, 2), 32]
    window.record(32, 31)
    assert window.size == 2


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(
    st.integers(1, 8),
    st.integers(0, 5),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=30),
)
def test_every_transition(start: int, step: int, extra: int, records: list[list[int]]) -> None:
    rules = HistoSpecSettings(window_start=start, window_step=step, window_max=start + extra)
    window = SpeculationWindow(rules)
    assert window.size == start
    for accepted, drafted in records:
        before = window.size
        window.record(drafted, accepted)
        if drafted == 0:
            assert window.size == before
        elif accepted < drafted:
            assert window.size == start
        else:
            assert window.size == min(before + step, start + extra)
        window = SpeculationWindow(rules, window.size)  # a move to another engine in between changes nothing


@pytest.mark.parametrize("size", [0, 1, 33])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="from 2 to 32"):
        SpeculationWindow(HistoSpecSettings(), size)


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1), (-1, -1)])
def test_impossible_counts_are_refused(drafted: int, accepted: int) -> None:
    window = SpeculationWindow(HistoSpecSettings())
    with pytest.raises(ValueError, match="accepted"):
        window.record(drafted, accepted)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    st.integers(1, 8),
    st.integers(0, 5),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)).filter(lambda both: both[0] <= both[1]), max_size=30),
)
def test_the_compiled_drafter_has_the_same_window(
    start: int, step: int, extra: int, records: list[tuple[int, int]]
) -> None:
    rules = HistoSpecSettings(window_start=start, window_step=step, window_max=start + extra)
    window, drafter = SpeculationWindow(rules), HistoryDrafter(rules)
    drafter.start("a", "p", [], 0, 100)
    for accepted, drafted in records:
        window.record(drafted, accepted)
        drafter.verified(Verified(["a"], [drafted], [accepted]))
        assert drafter.window("a") == window.size
