"""The JSON form of a run's events.

{"kind", "time" (unix seconds), "source" ("driver", "trainer", "engine-0", ...), "sequence" (counted from 0 per source),
and the event's fields}. Always strict JSON: a float that is not finite, such as a diverged loss, is written as the
string "nan", "inf" or "-inf".

Invariant: what `to_json` returns, `parse` turns back into the same event; what does not have the form of its kind is
refused by name, by both.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, Event, Recorded
from rhyme_openrlhf.telemetry.metrics import CountersError, EngineCounters

# Strict JSON has no numbers for these.
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class EventError(ValueError):
    """An event does not have the form of its kind; the message names both, and `kind` and `field` hold them."""

    def __init__(self, kind: str, field: str, problem: str) -> None:
        super().__init__(f"event {kind!r}, field {field!r}: {problem}")
        self.kind = kind
        self.field = field


_CLASS_OF_KIND = {cls.kind: cls for cls in EVENT_CLASSES}
_FIELDS = {cls.kind: {field.name: field for field in dataclasses.fields(cls)} for cls in EVENT_CLASSES}
_TYPES: dict[str, dict[str, Any]] = {cls.kind: get_type_hints(cls) for cls in EVENT_CLASSES}
_ENVELOPE_TYPES: dict[str, Any] = {"time": float, "source": str, "sequence": int}


def to_json(event: Event, time: float, source: str, sequence: int) -> dict[str, Any]:
    """The event's JSON form, of plain Python values (NumPy's numbers become plain ones).

    Raises EventError when a value does not have its field's type, so that a bad event fails where it is made.
    """
    row: dict[str, Any] = {"kind": event.kind}
    for name, value in {"time": time, "source": source, "sequence": sequence}.items():
        row[name] = _checked_envelope(event.kind, name, value)
    for name in _FIELDS[event.kind]:
        row[name] = _plain(_checked(event.kind, name, getattr(event, name), _TYPES[event.kind][name]))
    return row


def parse(row: Mapping[str, Any]) -> Recorded | None:
    """The event of a JSON form, or None when its kind is unknown.

    Raises EventError, naming kind and field, when a field is missing or has the wrong type.
    """
    kind = row.get("kind")
    if not isinstance(kind, str):
        raise EventError("?", "kind", "is missing or not a string")
    cls = _CLASS_OF_KIND.get(kind)
    if cls is None:
        return None
    envelope: dict[str, Any] = {}
    for name in _ENVELOPE_TYPES:
        if name not in row:
            raise EventError(kind, name, "is missing")
        envelope[name] = _checked_envelope(kind, name, row[name])
    values: dict[str, Any] = {}
    for name, field in _FIELDS[kind].items():
        if name in row:
            values[name] = _checked(kind, name, row[name], _TYPES[kind][name])
        elif field.default is dataclasses.MISSING:
            raise EventError(kind, name, "is missing")
    return Recorded(event=cls(**values), **envelope)


def _checked_envelope(kind: str, name: str, value: Any) -> Any:
    checked = _checked(kind, name, value, _ENVELOPE_TYPES[name])
    # Unlike a loss, a moment is never "nan": whoever shows the run computes with it.
    if name == "time" and not math.isfinite(checked):
        raise EventError(kind, name, f"must be finite, got {value!r}")
    return checked


def _checked(kind: str, field: str, value: Any, hint: Any) -> Any:
    """`value` as a plain value of type `hint`; raises EventError when it is none."""
    origin = get_origin(hint)
    if origin is types.UnionType:  # only `X | None` is used
        return None if value is None else _checked(kind, field, value, get_args(hint)[0])
    if origin is Literal:
        if value not in get_args(hint):
            raise EventError(kind, field, f"must be one of {', '.join(map(repr, get_args(hint)))}, got {value!r}")
        return value
    if origin is list and isinstance(value, list):
        return [_checked(kind, f"{field}[{i}]", item, get_args(hint)[0]) for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _checked(kind, f"{field}.{key}", item, get_args(hint)[1]) for key, item in value.items()}
    if hint is EngineCounters:
        return _checked_counters(kind, field, value)
    if hint in (int, float):
        return _checked_number(kind, field, value, hint)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise EventError(kind, field, f"must be {hint if origin else hint.__name__}, got {value!r}")


def _checked_number(kind: str, field: str, value: Any, hint: type) -> int | float:
    # The abstract types also take NumPy's numbers. bool is an int to Python, but a truth value is no number here.
    if not isinstance(value, bool):
        if hint is int and isinstance(value, numbers.Integral):
            return int(value)
        if hint is float and isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if hint is float and isinstance(value, numbers.Real):
            try:
                return float(value)
            except OverflowError as error:
                raise EventError(kind, field, "is too large for a float") from error
    raise EventError(kind, field, f"must be {hint.__name__}, got {value!r}")


def _checked_counters(kind: str, field: str, value: Any) -> EngineCounters:
    if isinstance(value, EngineCounters):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise EventError(kind, field, f"must be an object of counters, got {value!r}")
    try:
        return EngineCounters.from_dict(value)
    except CountersError as error:
        raise EventError(kind, f"{field}.{error.field}", str(error)) from error


def _plain(value: Any) -> Any:
    """A checked value as strict JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, EngineCounters):
        return value.to_dict()
    return value
