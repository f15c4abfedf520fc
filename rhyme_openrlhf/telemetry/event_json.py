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
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, Event, Recorded
from rhyme_openrlhf.telemetry.metrics import CountersError, EngineCounters
from rhyme_openrlhf.telemetry.run_directory import strict

# Strict JSON has no numbers for these.
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class EventError(ValueError):
    """An event does not have the form of its kind; the message names both, and `kind` and `field` hold them."""

    def __init__(self, kind: str, field: str, problem: str) -> None:
        super().__init__(f"event {kind!r}, field {field!r}: {problem}")
        self.kind = kind
        self.field = field


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether an event must have the field: one that a later version added has a default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


_CLASS_OF_KIND = {cls.kind: cls for cls in EVENT_CLASSES}
_TYPES: dict[str, dict[str, Any]] = {cls.kind: get_type_hints(cls) for cls in EVENT_CLASSES}

# Takes kind, field and value; returns the plain value or raises EventError.
_Check = Callable[[str, str, Any], Any]


def to_json(event: Event, time: float, source: str, sequence: int) -> dict[str, Any]:
    """Return the event's JSON form, of plain Python values (NumPy's numbers become plain ones).

    Raises EventError when a value does not have its field's type, so that a bad event fails where it is made.
    """
    kind = event.kind
    row: dict[str, Any] = {"kind": kind}
    row["time"] = _checked_time(kind, "time", time)
    row["source"] = _checked_text(kind, "source", source)
    row["sequence"] = _checked_int(kind, "sequence", sequence)
    for name, check, _ in _FIELDS[kind]:
        value = check(kind, name, getattr(event, name))
        row[name] = value.to_dict() if isinstance(value, EngineCounters) else strict(value)
    return row


def parse(row: Mapping[str, Any]) -> Recorded | None:
    """Return the event of a JSON form, or None when its kind is unknown.

    Raises EventError, naming kind and field, when a field is missing or has the wrong type.
    """
    kind = row.get("kind")
    if not isinstance(kind, str):
        raise EventError("?", "kind", "is missing or not a string")
    cls = _CLASS_OF_KIND.get(kind)
    if cls is None:
        return None
    envelope = {}
    for name, check in _ENVELOPE:
        if name not in row:
            raise EventError(kind, name, "is missing")
        envelope[name] = check(kind, name, row[name])
    values = {}
    for name, check, required in _FIELDS[kind]:
        if name in row:
            values[name] = check(kind, name, row[name])
        elif required:
            raise EventError(kind, name, "is missing")
    return Recorded(event=cls(**values), **envelope)


# The control plane takes tens of thousands of events a second. So the checks of a kind's fields are chosen once, and
# each check begins with the plain type that JSON gives.


def _checked_int(kind: str, field: str, value: Any) -> int:
    return value if type(value) is int else _other_number(kind, field, value, int)


def _checked_float(kind: str, field: str, value: Any) -> float:
    return value if type(value) is float else _other_number(kind, field, value, float)


def _checked_time(kind: str, field: str, value: Any) -> float:
    checked = _checked_float(kind, field, value)
    # Unlike a loss, a moment is never "nan": displays compute with it.
    if not math.isfinite(checked):
        raise EventError(kind, field, f"must be finite, got {value!r}")
    return checked


def _checked_text(kind: str, field: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise EventError(kind, field, f"must be str, got {value!r}")


def _checked_bool(kind: str, field: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise EventError(kind, field, f"must be bool, got {value!r}")


def _checked_counters(kind: str, field: str, value: Any) -> EngineCounters:
    if isinstance(value, EngineCounters):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise EventError(kind, field, f"must be an object of counters, got {value!r}")
    try:
        return EngineCounters.from_dict(value)
    except CountersError as error:
        raise EventError(kind, f"{field}.{error.field}", str(error)) from error


def _other_number(kind: str, field: str, value: Any, hint: type) -> Any:
    """Return a number that is not of the plain type, as one of it."""
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


_CHECKS: dict[Any, _Check] = {
    int: _checked_int,
    float: _checked_float,
    str: _checked_text,
    bool: _checked_bool,
    EngineCounters: _checked_counters,
}


def _check_of(hint: Any) -> _Check:
    """Return the check of a type hint; of unions, only `X | None` is used."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        return _check_or_none(_check_of(inside[0]))
    if origin is Literal:
        return _check_choice(inside)
    if origin is list:
        return _check_list(hint, _check_of(inside[0]))
    if origin is dict:
        return _check_dict(hint, _check_of(inside[1]))
    return _CHECKS[hint]


def _check_or_none(check: _Check) -> _Check:
    return lambda kind, field, value: None if value is None else check(kind, field, value)


def _check_choice(choices: tuple[Any, ...]) -> _Check:
    def check(kind: str, field: str, value: Any) -> Any:
        if value not in choices:
            raise EventError(kind, field, f"must be one of {', '.join(map(repr, choices))}, got {value!r}")
        return value

    return check


def _check_list(hint: Any, item: _Check) -> _Check:
    def check(kind: str, field: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise EventError(kind, field, f"must be {hint}, got {value!r}")
        return [item(kind, f"{field}[{i}]", one) for i, one in enumerate(value)]

    return check


def _check_dict(hint: Any, item: _Check) -> _Check:
    plain = {float: float, int: int, str: str}.get(get_args(hint)[1])

    def check(kind: str, field: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise EventError(kind, field, f"must be {hint}, got {value!r}")
        return {key: one if type(one) is plain else item(kind, f"{field}.{key}", one) for key, one in value.items()}

    return check


_ENVELOPE: tuple[tuple[str, _Check], ...] = (
    ("time", _checked_time),
    ("source", _checked_text),
    ("sequence", _checked_int),
)
# Of each kind: name, check, and whether it must be there.
_FIELDS: dict[str, tuple[tuple[str, _Check, bool], ...]] = {
    cls.kind: tuple(
        (field.name, _check_of(_TYPES[cls.kind][field.name]), is_required(field)) for field in dataclasses.fields(cls)
    )
    for cls in EVENT_CLASSES
}
