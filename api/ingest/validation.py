"""Validation of events: parsed JSON becomes rows for the store. Pure, and done before any lock is held.

Invariants:

- A batch is accepted as a whole, or refused with the position of its first bad event.
- Accepted events suit both databases (lengths, ranges, no NUL) and all later readers (no deeper than
  `json_values.DEPTH`).
- An event of an unknown kind, sent by a newer writer, is kept raw.

Tens of thousands of events per second pass this module. A normal event is therefore checked and converted in C
(`_quick`, with types derived from the event classes). Other events pass the Python checks below, which accept more
forms (NumPy's numbers, "nan") and explain errors. Both paths give the same result for events that both accept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import msgspec

from rhyme_openrlhf.api.ingest.decoding import BatchError
from rhyme_openrlhf.api.store.json_values import COUNT_MAX, DEPTH, TOO_DEEP, is_too_deep, storable
from rhyme_openrlhf.api.store.record import KIND_LENGTH, METRIC_LENGTH, NODE_LENGTH, SAMPLE_LENGTH, SOURCE_LENGTH
from rhyme_openrlhf.settings.redaction import redact_config
from rhyme_openrlhf.telemetry.event_json import EventError, is_required, parse
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, Evaluation, Event, RunStarted, TrainStep
from rhyme_openrlhf.telemetry.metrics import LATER, EngineCounters

ENVELOPE = ("kind", "time", "source", "sequence")
EVALUATION_PREFIX = "eval/"
# The range of an integer column in both databases.
INT32_MAX = 2**31 - 1
# About 136 years, so until 2106; sums of such seconds over many engines are exact in `totals.QUANTUM`.
SECONDS_MAX = 2.0**32
_BIG_COUNTS = frozenset(
    {"response_tokens", "drafted", "accepted", "tokens", "bytes"}
    | {"memory_used", "memory_total", "disk_free", "shared_memory", "object_store", "memory_bytes", "disk_bytes"}
)
_TEXT_LENGTHS = {"sample": SAMPLE_LENGTH, "node": NODE_LENGTH}


class BadEventError(BatchError):
    """An invalid event of a batch; `position` counts from 0. The whole batch is refused."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(position, problem)
        self.position = position
        self.problem = problem

    def __str__(self) -> str:
        return f"event {self.position} of the batch: {self.problem}"


class Arrived(NamedTuple):
    """A validated event for the store; `event` is None if its kind is unknown, `body` is JSON."""

    kind: str
    time: float
    source: str
    sequence: int
    body: str
    event: Event | None


def prepare(rows: Iterable[Any]) -> list[Arrived]:
    """Validate the events of a batch. Raises BadEventError."""
    arrived = []
    for position, row in enumerate(rows):
        try:
            arrived.append(_quick(row) or _arrived(row))
        except EventError as error:
            raise BadEventError(position, str(error)) from error
    return arrived


def from_store(kind: str, time: float, source: str, sequence: int, body: str) -> Arrived:
    """Return a stored event in its validated form; `event` is None if this version cannot read it."""
    try:
        recorded = parse(
            {**msgspec.json.decode(body), "kind": kind, "time": time, "source": source, "sequence": sequence}
        )
        if recorded is not None:
            _check(recorded.event)
    except EventError:
        recorded = None
    return Arrived(kind, time, source, sequence, body, recorded.event if recorded else None)


def _quick(row: Any) -> Arrived | None:
    """Return the event if it has the normal form of our writers, else None for the slower check."""
    try:
        kind = row["kind"]
        event_class, form = _FORMS[kind]
        checked: Any = msgspec.convert(row, form)
        event = msgspec.convert(row, event_class)
        time, source = checked.time, checked.source
        body = _without_secrets(kind, dict(row))
        del body["kind"], body["time"], body["source"], body["sequence"]
        text = _encode(body).decode("utf-8")
        if "null" in text:
            _refuse_not_finite(body.values())
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):  # the slower check explains the error
        return None
    # Each level has a bracket, so few brackets need no count of levels.
    if text.count("{") + text.count("[") >= DEPTH and is_too_deep(row):
        return None
    # JSON writes a NUL as an escape.
    if "\\u0000" in text or not -SECONDS_MAX <= time <= SECONDS_MAX or not _is_source(source):
        return None
    return Arrived(kind, time, source, checked.sequence, text, event)


def _arrived(row: Any) -> Arrived:
    if not isinstance(row, Mapping):
        raise EventError("?", "event", f"must be an object, got {type(row).__name__}")
    # Checked first, because the following code recurses.
    if is_too_deep(row):
        raise EventError("?", "event", TOO_DEEP)
    recorded = parse(row)
    kind = row["kind"]
    if recorded is None:
        # Checked with the envelope of a known kind, so that newer kinds obey the same rules.
        envelope = parse({**{key: row[key] for key in ENVELOPE if key in row}, **_PROBE})
        assert envelope is not None
        time, source, sequence, event = envelope.time, envelope.source, envelope.sequence, None
        if len(kind) > KIND_LENGTH or not storable(kind):
            raise EventError("?", "kind", f"must be plain text of at most {KIND_LENGTH} characters")
    else:
        time, source, sequence, event = recorded.time, recorded.source, recorded.sequence, recorded.event
        _check(event)
    if not _is_source(source):
        raise EventError(kind, "source", f"must be plain text of 1 to {SOURCE_LENGTH} characters")
    if not 0 <= sequence <= COUNT_MAX:
        raise EventError(kind, "sequence", f"must be from 0 to {COUNT_MAX}, got {sequence}")
    if abs(time) > SECONDS_MAX:
        raise EventError(kind, "time", f"must be unix seconds of at most {SECONDS_MAX:.0f}, got {time}")
    body = _without_secrets(kind, {key: value for key, value in row.items() if key not in ENVELOPE})
    try:
        return Arrived(kind, time, source, sequence, _body(body), event)
    except (TypeError, ValueError, OverflowError) as error:
        raise EventError(kind, "event", f"is not strict JSON: {error}") from error


# Cached, because a run has few sources and every event names one.
@lru_cache(maxsize=1024)
def _is_source(text: str) -> bool:
    return 0 < len(text) <= SOURCE_LENGTH and storable(text)


_PROBE: dict[str, Any] = {"kind": "note", "level": "info", "text": ""}
_encode = msgspec.json.Encoder().encode


def _without_secrets(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with the secrets of a run's command hidden; only this kind has a command."""
    return redact_config(body) if kind == RunStarted.kind else body


def _body(body: dict[str, Any]) -> str:
    # msgspec would write a non-finite float as null and lose it; only a lax JSON parser creates one.
    _refuse_not_finite(body.values())
    return _encode(body).decode("utf-8")


def _refuse_not_finite(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError("a number is not finite")
        elif isinstance(value, Mapping):
            _refuse_not_finite(value.values())
        elif isinstance(value, list):
            _refuse_not_finite(value)


def _check(event: Event) -> None:
    """Raise EventError if a value does not fit its column."""
    kind = event.kind
    values = vars(event)
    for name, largest in _INTEGERS[kind]:
        value = values[name]
        if value is not None and not -largest <= value <= largest:
            raise EventError(kind, name, f"must be at most {largest}, got {value}")
    for name in _SECONDS[kind]:
        # Non-finite values are allowed here; they are stored as NULL.
        if math.isfinite(values[name]) and abs(values[name]) > SECONDS_MAX:
            raise EventError(kind, name, f"must be at most {SECONDS_MAX:.0f}, got {values[name]}")
    for name in _TEXTS[kind]:
        value = values[name]
        if len(value) > _TEXT_LENGTHS.get(name, len(value)) or not storable(value):
            raise EventError(kind, name, f"must be plain text of at most {_TEXT_LENGTHS.get(name, 'any')} characters")
    special = _SPECIAL.get(type(event))
    if special is not None:
        special(event)


def _check_counters(event: Any) -> None:
    for name, value in vars(event.counters).items():
        largest = SECONDS_MAX if isinstance(value, float) else COUNT_MAX
        if not 0 <= value <= largest:
            raise EventError(event.kind, f"counters.{name}", f"must be from 0 to {largest:.0f}, got {value}")


def _check_metrics(event: Any) -> None:
    longest = METRIC_LENGTH - (len(EVALUATION_PREFIX) if isinstance(event, Evaluation) else 0)
    for name in event.metrics:
        if len(name) > longest or not storable(name):
            raise EventError(
                event.kind, f"metrics.{name[:longest]!r}", f"must have a name of at most {longest} characters"
            )
    for name, seconds in getattr(event, "seconds_by_part", {}).items():
        if math.isfinite(seconds) and abs(seconds) > SECONDS_MAX:
            raise EventError(event.kind, f"seconds_by_part.{name}", f"must be at most {SECONDS_MAX:.0f}, got {seconds}")


def _fields(event_class: type[Event], hints: Sequence[Any]) -> list[str]:
    return [name for name, hint in get_type_hints(event_class).items() if hint in hints]


_INTEGERS = {
    cls.kind: [(name, COUNT_MAX if name in _BIG_COUNTS else INT32_MAX) for name in _fields(cls, (int, int | None))]
    for cls in EVENT_CLASSES
}
_SECONDS = {
    cls.kind: [name for name in _fields(cls, (float,)) if name in ("seconds", "start", "end")] for cls in EVENT_CLASSES
}
_TEXTS = {cls.kind: [name for name in _fields(cls, (str,))] for cls in EVENT_CLASSES}
_SPECIAL: dict[type[Event], Any] = {TrainStep: _check_metrics, Evaluation: _check_metrics}
_SPECIAL.update({cls: _check_counters for cls in EVENT_CLASSES if EngineCounters in get_type_hints(cls).values()})


def _form(event_class: type[Event]) -> type[msgspec.Struct]:
    """Return the type that a row of this kind must match to pass `_check`, including the envelope.

    Other fields are ignored.
    """
    kind = event_class.kind
    limits = {name: _between(-largest, largest) for name, largest in _INTEGERS[kind]}
    limits |= {name: msgspec.Meta(ge=-SECONDS_MAX, le=SECONDS_MAX) for name in _SECONDS[kind]}
    limits |= {name: msgspec.Meta(max_length=length) for name, length in _TEXT_LENGTHS.items()}
    metric = METRIC_LENGTH - (len(EVALUATION_PREFIX) if event_class is Evaluation else 0)
    special: dict[str, Any] = {
        "counters": _COUNTERS,
        "metrics": dict[Annotated[str, msgspec.Meta(max_length=metric)], float],
        "seconds_by_part": dict[str, Annotated[float, msgspec.Meta(ge=-SECONDS_MAX, le=SECONDS_MAX)]],
    }
    hints = get_type_hints(event_class)
    fields: list[Any] = [("time", float), ("source", str), ("sequence", Annotated[int, _between(0, COUNT_MAX)])]
    for field in dataclasses.fields(event_class):
        hint = special.get(field.name, hints[field.name])
        if field.name in limits:
            inside = [one for one in get_args(hint) if one is not NoneType]
            hint = Annotated[inside[0], limits[field.name]] | None if inside else Annotated[hint, limits[field.name]]
        if is_required(field):
            fields.append((field.name, hint))
        elif field.default_factory is not dataclasses.MISSING:
            fields.append((field.name, hint, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, hint, field.default))
    form = msgspec.defstruct(event_class.__name__, fields, kw_only=True, gc=False)
    for known in (form, event_class):
        msgspec.json.Decoder(known)  # finds an unsupported type now, instead of taking it for a bad event later
    return form


def _between(low: int, high: int) -> msgspec.Meta:
    return msgspec.Meta(ge=low, le=high)


def _counter(name: str, hint: Any) -> tuple[Any, ...]:
    seconds, count = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)], Annotated[int, _between(0, COUNT_MAX)]
    limited = seconds if hint is float else count
    return (name, limited, 0) if name in LATER else (name, limited)


# Same rule as `EngineCounters.from_dict`: all counters are required except those that older writers lack.
_COUNTERS = msgspec.defstruct(
    "Counters", [_counter(name, hint) for name, hint in get_type_hints(EngineCounters).items()], kw_only=True
)
_FORMS = {cls.kind: (cls, _form(cls)) for cls in EVENT_CLASSES}
