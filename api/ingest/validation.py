"""Validation of events: parsed JSON becomes rows for the store. Pure, and done before any lock is held.

Invariants:

- A batch is accepted as a whole, or refused with the position of its first bad event.
- Accepted events suit both databases (lengths, ranges, no NUL) and all later readers (no deeper than
  `json_values.DEPTH`).
- An event of an unknown kind, sent by a newer writer, is kept raw.

`telemetry/event_json.py` decodes and checks an event's form. What only a store demands is checked here: tens of
thousands of events per second pass, so the fields to look at are chosen once a kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

import msgspec

from rhyme_openrlhf.api.ingest.decoding import BatchError
from rhyme_openrlhf.api.store.json_values import COUNT_MAX, DEPTH, TOO_DEEP, is_too_deep, storable
from rhyme_openrlhf.api.store.record import KIND_LENGTH, METRIC_LENGTH, NODE_LENGTH, SAMPLE_LENGTH, SOURCE_LENGTH
from rhyme_openrlhf.settings.redaction import redact_config
from rhyme_openrlhf.telemetry.event_json import EventError, read
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, Evaluation, Event, RunStarted, TrainStep
from rhyme_openrlhf.telemetry.metrics import EngineCounters

EVALUATION_PREFIX = "eval/"
# About 136 years, so until 2106; sums of such seconds over many engines are exact in `totals.QUANTUM`.
SECONDS_MAX = 2.0**32
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
            arrived.append(_arrived(row))
        except EventError as error:
            raise BadEventError(position, str(error)) from error
    return arrived


def from_store(kind: str, time: float, source: str, sequence: int, body: str) -> Arrived:
    """Return a stored event in its validated form; `event` is None if this version cannot read it."""
    try:
        event, _ = read(
            {**msgspec.json.decode(body), "kind": kind, "time": time, "source": source, "sequence": sequence}
        )
        if event is not None:
            _check(event)
    except EventError:
        event = None
    return Arrived(kind, time, source, sequence, body, event)


def _arrived(row: Any) -> Arrived:
    if not isinstance(row, dict):
        raise EventError("?", "event", f"must be an object, got {type(row).__name__}")
    event, envelope = read(row)
    kind = row["kind"]
    if event is not None:
        _check(event)
    elif len(kind) > KIND_LENGTH or not storable(kind):
        raise EventError("?", "kind", f"must be plain text of at most {KIND_LENGTH} characters")
    time, source, sequence = envelope.time, envelope.source, envelope.sequence
    if not _is_source(source):
        raise EventError(kind, "source", f"must be plain text of 1 to {SOURCE_LENGTH} characters")
    if not 0 <= sequence <= COUNT_MAX:
        raise EventError(kind, "sequence", f"must be from 0 to {COUNT_MAX}, got {sequence}")
    if abs(time) > SECONDS_MAX:
        raise EventError(kind, "time", f"must be unix seconds of at most {SECONDS_MAX:.0f}, got {time}")
    return Arrived(kind, time, source, sequence, _body(kind, row), event)


def _body(kind: str, row: dict[str, Any]) -> str:
    """Return the event without its envelope as JSON, without the secrets of a run's command."""
    body = row.copy()
    del body["kind"], body["time"], body["source"], body["sequence"]
    try:
        # The only kind that has a command.
        text = _encode(redact_config(body) if kind == RunStarted.kind else body).decode("utf-8")
        # A number that is not finite, which only a lax parser creates, would become null and be lost.
        if "null" in text and msgspec.json.decode(text) != body:
            raise ValueError("a number is not finite")
    except RecursionError as error:
        raise EventError(kind, "event", TOO_DEEP) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise EventError(kind, "event", f"is not strict JSON: {error}") from error
    # Each level has a bracket, so few brackets need no count of levels.
    if text.count("{") + text.count("[") >= DEPTH and is_too_deep(row):
        raise EventError(kind, "event", TOO_DEEP)
    return text


# Cached, because a run has few sources and every event names one.
@lru_cache(maxsize=1024)
def _is_source(text: str) -> bool:
    return 0 < len(text) <= SOURCE_LENGTH and storable(text)


_encode = msgspec.json.Encoder().encode


def _check(event: Event) -> None:
    """Raise EventError if a value that has the form of its field does not fit its column."""
    kind = event.kind
    for name in _SECONDS[kind]:
        # Non-finite values are allowed here; they are stored as NULL.
        if math.isfinite(getattr(event, name)) and abs(getattr(event, name)) > SECONDS_MAX:
            raise EventError(kind, name, f"must be at most {SECONDS_MAX:.0f}, got {getattr(event, name)}")
    for name in _TEXTS[kind]:
        value = getattr(event, name)
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


_SECONDS = {
    cls.kind: [name for name in _fields(cls, (float,)) if name in ("seconds", "start", "end")] for cls in EVENT_CLASSES
}
_TEXTS = {cls.kind: [name for name in _fields(cls, (str,))] for cls in EVENT_CLASSES}
_SPECIAL: dict[type[Event], Any] = {TrainStep: _check_metrics, Evaluation: _check_metrics}
_SPECIAL.update({cls: _check_counters for cls in EVENT_CLASSES if EngineCounters in get_type_hints(cls).values()})
