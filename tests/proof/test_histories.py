"""Each history drafts what its name says."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.history.index import DraftIndex, build_index
from rhyme_openrlhf.proof.histories import KINDS, RIGHT_START, STALE_EVERY, draft_of, history

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
RESPONSE = [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3]
CONTEXT = 7


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_valid_and_hold_tokens_of_the_text(kind: str) -> None:
    pieces = history(kind, PROMPT, RESPONSE, CONTEXT)
    assert DraftIndex.from_buffer(build_index(pieces))
    for piece in pieces:
        assert set(piece.tokens) <= {*PROMPT, *RESPONSE} and len(piece.context) <= CONTEXT


def test_right_and_stale() -> None:
    (right,), (stale,) = (history(kind, PROMPT, RESPONSE, CONTEXT) for kind in ("right", "stale"))
    assert list(right.tokens) == RESPONSE and list(right.context) == PROMPT[-CONTEXT:]
    differ = [i for i, (a, b) in enumerate(zip(right.tokens, stale.tokens, strict=True), start=1) if a != b]
    assert differ == list(range(STALE_EVERY, len(RESPONSE) + 1, STALE_EVERY))


@pytest.mark.parametrize(("kind", "right"), [("adversarial", 0), ("late", RIGHT_START)])
def test_a_bad_draft_is_wrong_where_it_says_at_every_position(kind: str, right: int) -> None:
    text = PROMPT + RESPONSE
    for at, piece in enumerate(history(kind, PROMPT, RESPONSE, CONTEXT), start=len(PROMPT)):
        assert list(piece.context) == text[max(0, at - CONTEXT) : at]
        assert list(piece.tokens[:right]) == text[at : at + right]
        assert piece.tokens[right] != text[at + right]


def test_a_text_of_one_token_has_a_wrong_one_too() -> None:
    assert history("adversarial", [5], [5, 5], 3)[0].tokens[0] == 6


def test_a_given_draft_follows_the_prompt() -> None:
    (piece,) = draft_of([1, 2], PROMPT, CONTEXT)
    assert (list(piece.context), list(piece.tokens)) == (PROMPT[-CONTEXT:], [1, 2])
