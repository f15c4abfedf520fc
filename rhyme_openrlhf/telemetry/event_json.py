"""The JSON form of events, from their classes (events.py).

It is {"kind", "time" (unix seconds), "source" ("driver", "trainer", "engine-0", ...), "sequence" (counted from 0 per
source), and the event's fields}. It is strict JSON: a float that is not finite, such as a diverged loss, is the string
"nan", "inf" or "-inf". What `to_json` returns, `parse` turns back into the same event. Both refuse by name what does
not have the form of its kind.
"""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec

from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, EngineStep, Event, Recorded
from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES, LATER
from rhyme_openrlhf.telemetry.run_directory import strict


class EventError(ValueError):
    """An event does not have the form of its kind; the message names both, and `kind` and `field` hold them."""

    def __init__(self, kind: str, field: str, problem: str) -> None:
        super().__init__(f"event {kind!r}, field {field!r}: {problem}")
        self.kind = kind
        self.field = field


class Envelope(msgspec.Struct):
    """The fields of all kinds. Unlike a loss, a moment is never "nan": displays compute with it."""

    time: Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    source: str
    sequence: int


# Met here, as the classes of events are in events.py.
msgspec.json.Decoder(Envelope)
Form = TypeVar("Form", bound=msgspec.Struct)
_CLASS_OF_KIND = {cls.kind: cls for cls in EVENT_CLASSES}


def to_json(event: Event, time: float, source: str, sequence: int) -> dict[str, Any]:
    """Return the event's JSON form, of plain Python values (NumPy's numbers become plain ones).

    Raises EventError when a value does not have its field's type, so that a bad event fails where it is made.
    """
    fields = msgspec.structs.asdict(event)
    try:
        row = msgspec.to_builtins({"time": time, "source": source, "sequence": sequence, **fields}, enc_hook=_plain)
    except TypeError as error:
        raise EventError(event.kind, "event", str(error)) from error
    recorded = parse({"kind": event.kind, **row})
    assert recorded is not None
    envelope = {"time": recorded.time, "source": source, "sequence": recorded.sequence}
    return {"kind": event.kind, **envelope, **strict(msgspec.to_builtins(msgspec.structs.asdict(recorded.event)))}


def parse(row: Mapping[str, Any]) -> Recorded | None:
    """Return the event of a JSON form, or None when its kind is unknown.

    Raises EventError, naming kind and field, when a field is missing or has the wrong type.
    """
    kind = row.get("kind")
    if isinstance(kind, str) and kind not in _CLASS_OF_KIND:
        return None
    event, envelope = read(row)
    assert event is not None
    return Recorded(event, envelope.time, envelope.source, envelope.sequence)


def read(row: Mapping[str, Any]) -> tuple[Event | None, Envelope]:
    """Return the event of a JSON form, None when its kind is unknown, and its envelope. Raises EventError."""
    kind = row.get("kind")
    if not isinstance(kind, str):
        raise EventError("?", "kind", "is missing or not a string")
    envelope = _convert(kind, row, Envelope)
    cls = _CLASS_OF_KIND.get(kind)
    if cls is None:
        return None, envelope
    try:
        event = msgspec.convert(row, cls)
    except ValueError:
        event = _convert(kind, _with_floats(row, cls), cls)
    if cls is EngineStep:
        for name in _REQUIRED_COUNTERS:
            if name not in row["counters"]:
                raise EventError(kind, f"counters.{name}", "is missing")
    return event, envelope


# The counters have defaults for those who count. In a record, only those that older writers lack may be missing.
_REQUIRED_COUNTERS = [name for name in COUNTER_NAMES if name not in LATER]
_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def _with_floats(row: Mapping[str, Any], cls: type[Event]) -> dict[str, Any]:
    """Return the row with its strings for floats that strict JSON lacks as floats."""
    hints = get_type_hints(cls)
    return {name: _floats(value) if "float" in str(hints.get(name)) else value for name, value in row.items()}


def _floats(value: Any) -> Any:
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    if isinstance(value, dict):
        return {key: _floats(item) for key, item in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a number or text of a library as Python's own."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError


def _convert(kind: str, row: Mapping[str, Any], cls: type[Form]) -> Form:
    """Return the fields of `cls` in a row. Raises EventError, naming the field."""
    try:
        return msgspec.convert(row, cls)
    except ValueError as error:  # ValidationError, or UnicodeEncodeError of text that is no Unicode
        problem, _, place = str(error).partition(" - at ")
        field = place.rpartition("$")[2].strip(".`")
        if missing := re.search(r"missing required field `(\w+)`", problem):
            field, problem = missing[1], "is missing"
        elif field.endswith("[...]"):
            name, hint = field.removesuffix("[...]"), get_type_hints(cls)[field.removesuffix("[...]")]
            field = next((f"{name}.{key}" for key, one in row[name].items() if not _fits({key: one}, hint)), name)
        raise EventError(kind, field or "event", problem[0].lower() + problem[1:]) from error


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except ValueError:
        return False
    return True
