"""Storing one batch of one attempt completely or not at all, in the caller's transaction.

Invariants:

- An event is stored once, identified by its source's sequence number; sending it again changes nothing.
- Derived rows follow from the stored events alone. The split into batches and the interleaving of sources and attempts
  do not matter.
- The run's row is locked while a batch is written. Batches of one run wait for each other; those of different runs do
  not (on PostgreSQL; SQLite has one writer).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import DataError, NoResultFound
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest.announce import Sender, admit
from rhyme_openrlhf.api.ingest.decoding import FormError
from rhyme_openrlhf.api.ingest.derived_rows import derive, remove, update_header
from rhyme_openrlhf.api.ingest.rollup import claimed_steps
from rhyme_openrlhf.api.ingest.validation import Arrived, from_store
from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.bounds import INT64
from rhyme_openrlhf.api.store.bulk import BulkInsert, replace
from rhyme_openrlhf.api.store.json_values import COUNT_MAX
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.record import EventSource, RawEvent

# Stored events that are read at once.
PIECE = 5_000
# Most events of an attempt that may be missing, over all its sources.
MOST_LOST = COUNT_MAX
# An import whose last transaction is so old was killed: each takes a fraction of a second, and may wait for a lock.
BROKEN_OFF_SECONDS = 60.0
_EVENT_COLUMNS = ("run_id", "attempt_id", "source", "sequence", "time", "kind", "body")
_SOURCE_COLUMNS = ("attempt_id", "source", "next_sequence", "gaps", "dropped")
_EVENTS: Any = RawEvent.__table__
_SOURCES: Any = EventSource.__table__
_write_events = BulkInsert(_EVENTS, _EVENT_COLUMNS)
_write_sources = BulkInsert(_SOURCES, _SOURCE_COLUMNS, replace(("attempt_id", "source"), _SOURCE_COLUMNS))


class UnknownAttemptError(LookupError):
    """The attempt was not announced; the message is one sentence for the reporter."""


class ReplacingError(Exception):
    """An import is replacing the attempt's events (`replacement.py`); the message is one sentence for the sender."""


@dataclass(frozen=True)
class Receipt:
    """The result of a batch. `stop`: the run is asked to end.

    `following`: the next sequence number of the sources that the batch names, or of all sources if it names none.
    """

    accepted: int
    duplicates: int
    stop: bool
    following: dict[str, int]


def ingest(
    session: Session,
    attempt_uid: str,
    arrived: Sequence[Arrived],
    now: float,
    alive: bool | None = None,
    given_up: Mapping[str, int] | None = None,
    known: Mapping[str, int] | None = None,
    sender: Sender | None = None,
) -> Receipt:
    """Store a batch from `validation.prepare`, which needs no lock; an empty batch is a heartbeat.

    - `now`: unix seconds of the server's clock
    - `alive`: the reporter's view of the driver's process, None if unknown
    - `given_up`: number of events of each source that the reporter will never send, since the attempt began. If later
      events follow, they appear as gaps too, and are not counted twice.
    - `known`: the next sequence number of each source as confirmed to the reporter. If the store has less, it has lost
      events. Then nothing is stored, because the reporter sends the lost events first.
    - `sender`: None is the service itself

    Raises UnknownAttemptError, ForeignRunError, ReplacingError, FormError.
    """
    run, attempts, attempt = locked(session, attempt_uid)
    admit(run, attempt, sender)
    await_replacement(session, run, attempt, now)
    known = known or {}
    sources = _sources(session, attempt)
    stop = attempt.stop_requested_at is not None
    stored = {source: row.next_sequence for source, row in sources.items()}
    lost = {source: stored.get(source, 0) for source, count in known.items() if stored.get(source, 0) < count}
    if lost:
        run_status.heard(run, attempts, attempt, None, now)
        # Lost sources first, because a long response is cut.
        return Receipt(0, 0, stop, lost | stored)
    fresh, following = _add(session, run, attempts, attempt, sources, arrived, given_up or {})
    run_status.heard(run, attempts, attempt, alive, now)
    if named := {*known, *(one.source for one in arrived)}:
        following = {source: following.get(source, 0) for source in named}
    return Receipt(len(fresh), len(arrived) - len(fresh), stop, following)


def add_events(
    session: Session, attempt_uid: str, arrived: Sequence[Arrived], replacing: bool = False
) -> list[Arrived]:
    """Store events that no reporter sent; return the new ones. `replacing`: the replacement of all events does it.

    Raises UnknownAttemptError, ReplacingError, FormError.
    """
    run, attempts, attempt = locked(session, attempt_uid)
    if not replacing:
        await_replacement(session, run, attempt, time.time())
    return _add(session, run, attempts, attempt, _sources(session, attempt), arrived, {})[0]


def await_replacement(session: Session, run: Run, attempt: Attempt, now: float) -> None:
    """Raise ReplacingError if an import is replacing the attempt's events; delete what one that broke off has left."""
    if is_being_replaced(attempt, now):
        raise ReplacingError("an import is replacing the events of this attempt: send the batch again")
    if attempt.replacing_at is not None:
        forget_events(session, run, attempt)
        attempt.replacing_at = None


def is_being_replaced(attempt: Attempt, now: float) -> bool:
    """Return whether an import is replacing the attempt's events. One that was silent for long has broken off."""
    # In either direction, because clocks are set.
    return attempt.replacing_at is not None and abs(now - attempt.replacing_at) < BROKEN_OFF_SECONDS


def remove_attempts(session: Session, run: Run, attempts: Sequence[Attempt], gone: Collection[Attempt]) -> None:
    """Remove some `attempts` of a locked run; its derived rows then follow from the events of the others.

    The run keeps the configuration of its newest announcement.
    """
    spoke = any([_sources(session, attempt) for attempt in gone])
    for attempt in gone:
        forget_events(session, run, attempt)
        session.delete(attempt)
    session.flush()
    left = [attempt for attempt in attempts if attempt not in gone]
    run_status.follow(run, left)
    if spoke:
        _derive_again(session, run, left)


def _derive_again(session: Session, run: Run, attempts: Sequence[Attempt]) -> None:
    """Derive all rows of a run again, because a removed attempt has replaced some."""
    remove(session, run, [one.id for one in attempts], None)
    run.engines = run.tensor_parallel_size = run.epochs = run.steps_total = None
    run.reward = run.tokens_per_second = run.speculation_rate = run.bubble_fraction = run.last_event_at = None
    run.step = run.epoch = 0
    for attempt in attempts:
        attempt.first_step = None
        for arrived in _stored(session, attempt):
            run.last_event_at = max(run.last_event_at or 0.0, max(one.time for one in arrived))
            _derive(session, run, attempts, attempt, arrived)


def _stored(session: Session, attempt: Attempt) -> Iterator[list[Arrived]]:
    """Yield an attempt's raw events in the order of their arrival."""
    after = 0
    of = _EVENTS.c
    mine = select(of.id, of.kind, of.time, of.source, of.sequence, of.body)
    mine = mine.where(of.run_id == attempt.run_id, of.attempt_id == attempt.id).order_by(of.id).limit(PIECE)
    while rows := session.connection().execute(mine.where(of.id > after)).all():
        after = rows[-1].id
        yield [from_store(*row[1:]) for row in rows]


def forget_events(session: Session, run: Run, attempt: Attempt) -> None:
    """Delete an attempt's events and derived rows, so that its whole record can be stored again."""
    connection = session.connection()
    remove(session, run, [attempt.id], None)
    connection.execute(_EVENTS.delete().where(_EVENTS.c.attempt_id == attempt.id))
    connection.execute(_SOURCES.delete().where(_SOURCES.c.attempt_id == attempt.id))
    _count_dropped(session, run)


def locked(session: Session, attempt_uid: str) -> tuple[Run, list[Attempt], Attempt]:
    """Return the run, its attempts, and the attempt with that uid, all locked. Raises UnknownAttemptError."""
    run_id = session.execute(select(Attempt.run_id).where(Attempt.uid == attempt_uid)).scalar_one_or_none()
    if run_id is None:
        raise UnknownAttemptError(f"attempt {attempt_uid} is unknown: announce it first")
    try:
        run, attempts = run_status.lock_run(session, run_id)
    except NoResultFound:
        attempts = []
    for attempt in attempts:
        if attempt.uid == attempt_uid:
            return run, attempts, attempt
    raise UnknownAttemptError(f"attempt {attempt_uid} was deleted just now")


@contextmanager
def _sums_that_fit() -> Iterator[None]:
    """Raise FormError where a sum is too large. Each number fits into its column (`validation.py`)."""
    try:
        yield
    except (DataError, OverflowError) as error:
        raise FormError(
            "the sums of the events' numbers are too large", "body.events", "must have sums of 64 bits"
        ) from error


@_sums_that_fit()
def _add(
    session: Session,
    run: Run,
    attempts: Sequence[Attempt],
    attempt: Attempt,
    sources: Mapping[str, Any],
    arrived: Sequence[Arrived],
    given_up: Mapping[str, int],
) -> tuple[list[Arrived], dict[str, int]]:
    """Write the new raw events and their derived rows; return them, and each source's next sequence number."""
    connection = session.connection()
    following = defaultdict(int, {source: row.next_sequence for source, row in sources.items()})
    gaps = defaultdict(int, {source: row.gaps for source, row in sources.items()})
    dropped = {source: row.dropped for source, row in sources.items()}
    fresh = []
    for one in arrived:
        if one.sequence >= following[one.source]:
            gaps[one.source] += one.sequence - following[one.source]
            following[one.source] = one.sequence + 1
            fresh.append(one)
    filled = {source: row.filled for source, row in sources.items()}
    lost = {
        source: max(dropped.get(source, 0), gaps[source], given_up.get(source, 0) - filled.get(source, 0))
        for source in {*following, *given_up}
    }
    total, before = sum(lost.values()), sum(dropped.values())
    if total > max(MOST_LOST, before):
        raise FormError("the events have too large gaps", "body.events", f"must lack at most {MOST_LOST} events in all")
    changed = {one.source for one in fresh} | {source for source in lost if lost[source] != dropped.get(source, 0)}
    _write_sources(connection, [(attempt.id, name, following[name], gaps[name], lost[name]) for name in changed])
    if total != before:
        _count_dropped(session, run)
    if fresh:
        ids = (run.id, attempt.id)
        _write_events(connection, [(*ids, e.source, e.sequence, e.time, e.kind, e.body) for e in fresh])
        run.last_event_at = max(run.last_event_at or 0.0, max(one.time for one in fresh))
        _derive(session, run, attempts, attempt, fresh)
    return fresh, following


def _sources(session: Session, attempt: Attempt) -> dict[str, Any]:
    """Return the rows of `event_sources` of an attempt, by source."""
    rows = session.connection().execute(select(_SOURCES).where(_SOURCES.c.attempt_id == attempt.id))
    return {row.source: row for row in rows}


def _count_dropped(session: Session, run: Run) -> None:
    dropped = select(EventSource.dropped).join(Attempt, Attempt.id == EventSource.attempt_id)
    # Added up here, because a database refuses a sum of more than 64 bits.
    run.dropped_events = min(sum(session.scalars(dropped.where(Attempt.run_id == run.id))), INT64)


def _derive(
    session: Session, run: Run, attempts: Sequence[Attempt], attempt: Attempt, fresh: Sequence[Arrived]
) -> None:
    """Update derived rows, the run's roll-up and its status."""
    first = min(claimed_steps(fresh), default=None)
    if first is not None and (attempt.first_step is None or first < attempt.first_step):
        attempt.first_step = first
        older = [one.id for one in attempts if one.number < attempt.number]
        if older:
            remove(session, run, older, first)
    newer = [one.first_step for one in attempts if one.number > attempt.number and one.first_step is not None]
    rollup = derive(session, run, attempt.id, min(newer, default=None), fresh)
    update_header(session, run, attempt, rollup)
    if rollup.started is not None:
        run_status.began(run, attempts, attempt, rollup.started[1])
    if rollup.finished is not None:
        event, time = rollup.finished
        run_status.move(run, attempts, attempt, event.status, event.message, time)
