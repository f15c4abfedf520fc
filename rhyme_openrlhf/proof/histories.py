"""Histories that a draft can be made from, good and bad ones, to show that none of them changes what is sampled. Pure.

Invariants: every piece begins with the last `context` tokens before it, so that its first token is drafted. A wrong
token always differs from the right one, and the text itself holds it (so the model has it).
"""

from __future__ import annotations

from collections.abc import Sequence

from rhyme_openrlhf.history.index import Piece

KINDS = ("right", "stale", "adversarial", "late")
# A stale response differs in every STALE_EVERY-th token, like an older policy's response.
STALE_EVERY = 9
# As long as the longest draft by default (--histospec.window_max).
WRONG_DRAFT = 32
# Right tokens with which a "late" draft starts: with the smallest window (2) one is accepted and one refused.
RIGHT_START = 1


def history(kind: str, prompt: Sequence[int], response: Sequence[int], context: int) -> list[Piece]:
    """Return pieces of one of KINDS for the right response to a prompt.

    - right: the response itself.
    - stale: the response with some tokens changed.
    - adversarial: after every stretch of the response, a draft that is wrong from its first token on.
    - late: the same, but wrong only after a right start.
    """
    if kind == "right":
        return [Piece(list(prompt[-context:]), list(response), 1.0)]
    others = _others([*prompt, *response])
    if kind == "stale":
        old = [others[token] if i % STALE_EVERY == 0 else token for i, token in enumerate(response, start=1)]
        return [Piece(list(prompt[-context:]), old, 1.0)]
    right = {"adversarial": 0, "late": RIGHT_START}[kind]
    text = [*prompt, *response]
    pieces = []
    for at in range(len(prompt), len(text) - right):
        wrong = [others[text[at + right]]] * WRONG_DRAFT
        pieces.append(Piece(text[max(0, at - context) : at], text[at : at + right] + wrong, 1.0))
    return pieces


def draft_of(tokens: Sequence[int], prompt: Sequence[int], context: int) -> list[Piece]:
    """Return a history whose draft, right after the prompt, is `tokens`."""
    return [Piece(list(prompt[-context:]), list(tokens), 1.0)]


def _others(text: Sequence[int]) -> dict[int, int]:
    """Return for each token another one of the text (the next greater; of a text of one token, the token above)."""
    tokens = sorted(set(text))
    if len(tokens) == 1:
        return {tokens[0]: tokens[0] + 1}
    return dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True))
