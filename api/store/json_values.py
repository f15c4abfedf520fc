"""JSON from clients that both databases can store.

Invariants:

- A valid value has only finite numbers, whole numbers of 64 bits, text without NUL and lone surrogates, at most `DEPTH`
  levels and at most `MOST_VALUES` names and values.
- Reading JSON raises ValueError for every other text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator

# A configuration has three levels; recursive readers (ours, databases', browsers') handle far more than this.
DEPTH = 32
TOO_DEEP = f"must not be nested deeper than {DEPTH} levels"

# A run's configuration has some 1,500; each becomes a row, or is redacted and compared whenever the run is shown.
MOST_VALUES = 5_000
# Every reader of JSON has these; events have the same.
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**64 - 1

COUNT_MAX = 2**53  # the largest integer that JSON readers hold exactly, also for sums of counts


def read_json(text: bytes) -> Any:
    """Return the value of a JSON text that can be stored. Raises ValueError with one sentence."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    return check_json(value)


def check_json(value: Any) -> Any:
    """Return `value`. Raises ValueError with one sentence if it cannot be stored."""
    count = 0
    for number, level in enumerate(_levels(value)):
        if number == DEPTH:
            raise ValueError(TOO_DEEP)
        count += len(level)
        if count > MOST_VALUES:
            raise ValueError(f"must not have more than {MOST_VALUES} names and values")
        for item in level:
            _check_one(item)
    return value


def is_too_deep(value: Any) -> bool:
    """Return whether a value has more than `DEPTH` levels, without recursion."""
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
    if isinstance(value, int) and not INTEGER_MIN <= value <= INTEGER_MAX:
        raise ValueError("must not have whole numbers of more than 64 bits")
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("must not have NUL in its text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("must not have lone surrogates in its text") from error


def storable(text: str) -> bool:
    """Return True if both databases can store this text: no NUL (PostgreSQL) and no lone surrogates (UTF-8)."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
