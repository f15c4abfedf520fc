"""The line of an error's message that a person reads, also of an error without a message."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.engine_errors import first_line, last_line


@pytest.mark.parametrize(
    ("message", "first", "last"),
    [("one", "one", "one"), ("\n what \n\n raised: why\n", "what", "raised: why"), ("", "no message", "no message")],
)
def test_an_error_is_told_in_one_line(message: str, first: str, last: str) -> None:
    assert (first_line(ValueError(message)), last_line(ValueError(message))) == (first, last)
