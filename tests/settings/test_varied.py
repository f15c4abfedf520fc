"""Values of a sweep as people write them."""

from typing import Any

import pytest

from rhyme_openrlhf.settings.varied import Range, read_values


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("1e-6, 3e-6", [1e-6, 3e-6]),
        ("1,2,3", [1, 2, 3]),
        ("true,null,grpo", [True, None, "grpo"]),
        (" 0.5..1 ", Range(0.5, 1.0)),
        ("linear:1..8", Range(1.0, 8.0)),
        ("log:1e-7..1e-5", Range(1e-7, 1e-5, "log")),
        # A path with two dots, and an address with a colon, are no ranges.
        ("http://a..b", ["http://a..b"]),
        ("", []),
    ],
)
def test_a_list_and_a_range_are_told_apart(written: str, found: Any) -> None:
    assert read_values(written) == found


def test_a_range_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="a range is LOW..HIGH"):
        read_values("log:a..b")


def test_what_json_cannot_read_is_a_text() -> None:
    for written in ("[" * 2400, "[" * 100_000, "9" * 5000):
        assert read_values(written) == [written]
