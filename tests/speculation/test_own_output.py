"""Drafts from a sample's own text: found against a search through everything, and never a wrong match."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.speculation.own_output import FIRST_CAPACITY, LONGEST_MEASURED, OwnOutput

tokens = st.lists(st.integers(0, 3), max_size=80)


def occurrences(text: list[int], length: int) -> list[int]:
    """Where the last `length` tokens occurred before: the places right after them."""
    end = text[len(text) - length :]
    return [at for at in range(length, len(text)) if text[at - length : at] == end]


@given(st.lists(tokens, max_size=8), st.integers(1, 4))
def test_a_match_is_one_and_is_found_when_there_is_one(parts: list[list[int]], shortest: int) -> None:
    own, text = OwnOutput(shortest), []
    for part in parts:
        own.extend(part)
        text += part
        length = own.match_length
        assert len(own) == len(text)
        if length:
            assert length >= shortest
            drafted = own.draft(5)
            measured = min(length, LONGEST_MEASURED)
            assert any((text[at:] + drafted)[:5] == drafted for at in occurrences(text, measured))
        elif len(text) >= shortest:
            # Four different tokens never fill the table: nothing is taken over.
            assert not occurrences(text, shortest)
            assert own.draft(5) == []


def test_a_loop_is_drafted_on() -> None:
    own = OwnOutput(3)
    own.extend([1, 2, 3, 4] * 2)
    assert own.match_length == 4
    assert own.draft(10) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert own.draft(0) == []


def test_the_most_recent_occurrence_counts() -> None:
    own = OwnOutput(2)
    own.extend([1, 2, 7, 1, 2, 8, 1, 2])
    assert own.draft(1) == [8]


def test_it_does_not_matter_how_the_tokens_came() -> None:
    text = [number * number % 11 for number in range(4 * FIRST_CAPACITY)]
    whole, single = OwnOutput(3), OwnOutput(3)
    whole.extend(text)
    for token in text:
        single.extend([token])
    assert (whole.match_length, whole.draft(20)) == (single.match_length, single.draft(20))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=400))
def test_any_token_id_is_fine(text: list[int]) -> None:
    own = OwnOutput(3)
    own.extend(text + text)
    if len(text) >= 3:
        assert own.match_length >= 3
        assert own.draft(len(text)) == (text + text)[: len(text)] or occurrences(text + text, 3)
