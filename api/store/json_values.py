"""JSON that clients send and both databases keep: which values are let in.

Invariant: what passes has only finite numbers, text without NUL and lone surrogates, and no more than `DEPTH` levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator

# A configuration has three levels; recursive readers (ours, databases', browsers') stand far more than this.
DEPTH = 32
TOO_DEEP = f"must not be nested deeper than {DEPTH} levels"

COUNT_MAX = 2**53  # what readers of JSON hold exactly, and columns of counts that are also summed


def check_json(value: Any) -> Any:
    """`value` itself. Raises ValueError, in one sentence, for what cannot be kept."""
    for number, level in enumerate(_levels(value)):
        if number == DEPTH:
            raise ValueError(TOO_DEEP)
        for item in level:
            _check_one(item)
    return value


def is_too_deep(value: Any) -> bool:
    """Return whether a value has more than `DEPTH` levels; found without recursion."""
    return any(number == DEPTH for number, _ in enumerate(_levels(value)))


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values of each level, the outermost first."""
    level = [value]
    while level:
        yield level
        following: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                following.extend(item.keys())
                following.extend(item.values())
            elif isinstance(item, list):
                following.extend(item)
        level = following


def _check_one(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must not have numbers that are not finite")
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("must not have NUL in its text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("must not have lone surrogates in its text") from error


def storable(text: str) -> bool:
    """Whether both databases take this text: PostgreSQL has no NUL, and a lone surrogate is no UTF-8."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
