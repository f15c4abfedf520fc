"""The values of an option that differs between the runs of a sweep, and how people write them. Pure.

`1e-6,3e-6` lists values, `1e-7..1e-5` is a range and `log:1e-7..1e-5` a logarithmic one. The command line, the form of
a new run and the API read them with this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Scale = Literal["linear", "log"]
_SCALES: dict[str, Scale] = {"": "linear", "linear": "linear", "log": "log"}


@dataclass(frozen=True)
class Range:
    """The values from `low` to `high`, both included, of a numeric option; "log": equal ratios are equally likely."""

    low: float
    high: float
    scale: Scale = "linear"


def read_values(written: str) -> list[Any] | Range:
    """Return the values or the range that a person wrote. Raises ValueError, whose message is one sentence."""
    scale, _, ends = written.strip().rpartition(":")
    low, dots, high = ends.partition("..")
    if dots and scale in _SCALES:
        try:
            return Range(float(low), float(high), _SCALES[scale])
        except ValueError:
            raise ValueError(f"a range is LOW..HIGH or log:LOW..HIGH, got {written[:100]!r}") from None
    return [read_value(one.strip()) for one in written.split(",")] if written.strip() else []


def read_value(written: str) -> Any:
    """Return a value, which is JSON where it can be, else text."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
