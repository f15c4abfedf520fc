"""The last resort: what mostly followed a token lately in what the samples of a prompt have written."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.drafting.whole_texts import WholeTexts

FAR = 10**6
MOST_VOTES = 4


def drafter() -> WholeTexts:
    """Nothing matches but single tokens."""
    made = WholeTexts(HistoSpecSettings(prefix_min=16, own_output=False, shared_tokens=0))
    for name in ("writer", "asker"):
        made.begin(name, "p", 1, FAR)
    return made


def next_token(made: WholeTexts, token: int, asked: list[int] | None = None) -> int:
    """What the asker, that has written nothing but the token, is drafted behind it; -1: nothing."""
    made.finish("asker")
    made.begin("asker", "p", 1, FAR)
    (draft,) = made.draft_for(["asker"], [[token]])
    return draft[0] if draft else -1


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3) | st.integers(2**31 - 4, 2**31 - 1), max_size=60), max_size=4))
def test_nothing_is_found_that_never_followed(parts: list[list[int]]) -> None:
    made, text = drafter(), [0]
    for part in parts:
        text += part
        made.draft_for(["writer"], [text])
    followed = Counter(zip(text, text[1:], strict=False))
    for token in set(text):
        after = {then for first, then in followed if first == token}
        found = next_token(made, token)
        assert found in after or found == -1
        if len(after) == 1 and slot(token) not in {slot(other) for other in set(text) - {token}}:
            assert found in after


def slot(token: int) -> int:
    """Where csrc/texts.cpp keeps the pairs of a token."""
    mixed = token * 2654435769 & (1 << 32) - 1
    return (mixed ^ mixed >> 16) & 4095


def test_the_majority_of_what_is_said_lately_is_found() -> None:
    made, text = drafter(), [0]

    def say(*then: int) -> None:
        text.extend(token for one in then for token in (7, one))
        made.draft_for(["writer"], [text])

    say(8, 9, 8, 8, 9, 8)
    assert next_token(made, 7) == 8
    say(*[8] * 100)
    say(*[9] * MOST_VOTES)
    assert next_token(made, 7) == 8
    say(9)
    assert next_token(made, 7) == 9


def test_a_token_that_was_never_seen_has_no_follower_though_another_has_its_slot() -> None:
    twin = next(token for token in range(8, 100_000) if slot(token) == slot(7))
    made = drafter()
    made.draft_for(["writer"], [[0, 7, 8]])
    assert [next_token(made, token) for token in (7, 8, twin)] == [8, -1, -1]
