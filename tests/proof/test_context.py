"""The place at which sampled tokens tell most."""

from __future__ import annotations

import math

from rhyme_openrlhf.engine.messages import Answer
from rhyme_openrlhf.proof.context import most_telling


def answer(*chances: float) -> Answer:
    return Answer(tuple(range(len(chances))), tuple(map(math.log, chances)))


def test_the_most_telling_place_is_certain_first_and_open_next() -> None:
    found = most_telling([([7], answer(0.5, 0.5)), ([8, 9], answer(0.6, 0.99, 0.2, 0.9))])
    assert found is not None
    assert (found.prompt, found.first, found.second) == ((8, 9, 0), 1, 2)
    assert math.isclose(found.tells, 0.99 * 0.8)


def test_responses_of_one_token_have_no_such_place() -> None:
    assert most_telling([([1], answer(0.5)), ([2], Answer((), ()))]) is None
