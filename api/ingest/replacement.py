"""Replacement of an attempt's events by those of its run directory, in short transactions between those of others.

Invariants:

- While it lasts, only the replacement stores events of the attempt: `Attempt.replacing_at` is the time of its last
  transaction. Other senders come again (`store_batch.ReplacingError`).
- One that broke off leaves nothing half done: the next sender or import deletes what it has left and goes on.
- A transaction deletes at most `CHUNK` rows of tables that grow with a run's length, or stores one chunk of events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CursorResult, delete, select, tuple_, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest.store_batch import ReplacingError, add_events, forget_events, locked
from rhyme_openrlhf.api.ingest.validation import Arrived
from rhyme_openrlhf.api.store.database import Database, DatabaseError
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.record import (
    EngineSampleRow,
    EngineStepRow,
    EventSource,
    Interval,
    Metric,
    Move,
    RawEvent,
    Switch,
    SystemRow,
)

# Rows per transaction: well below a second on a slow disk.
CHUNK = 20_000
# `Attempt.replacing_at` of a replacement that has ended without having replaced everything.
BROKEN_OFF = 0.0
# Tables whose rows belong to steps. The few rows of `steps` are deleted at once, because sums over them change too.
_OF_STEPS: tuple[Any, ...] = (Interval, EngineSampleRow, EngineStepRow, Metric, Move, Switch)


@dataclass(frozen=True)
class Given:
    """The earlier knowledge of a source: events that its reporter had given up, filled in already or not."""

    filled: int
    dropped: int


def delete_some(session: Session, table: Any, *conditions: Any, most: int) -> int:
    """Delete at most `most` rows that meet the conditions; return their number."""
    key = table.__table__.primary_key.columns
    some = select(*key).where(*conditions).limit(most)
    query = delete(table).where(tuple_(*key).in_(some))
    done = session.execute(query, execution_options={"synchronize_session": False})
    assert isinstance(done, CursorResult)
    return done.rowcount


class Replacement:
    """One replacement of the events of an attempt, which `begin` has marked in the transaction of the caller."""

    def __init__(self, database: Database, attempt: Attempt, given: Mapping[str, Given]) -> None:
        """Mark the attempt; `given` by source. The caller commits."""
        self._database = database
        self._uid = attempt.uid
        self._given = given
        self._stamp = attempt.replacing_at = time.time()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Leave a mark for the next sender if the block raises."""
        whole = False
        try:
            yield
            whole = True
        finally:
            if not whole:
                # Without the mark, the next sender waits for a while.
                lost = suppress(DatabaseError, SQLAlchemyError, LookupError, ReplacingError)
                with lost, self._piece() as (_, _, attempt):
                    attempt.replacing_at = BROKEN_OFF

    def forget_some(self) -> bool:
        """Delete a part of the stored events and of their derived rows; return whether that was the last one."""
        with self._piece() as (session, run, attempt):
            left = CHUNK
            for table, *conditions in _grown(run, attempt):
                left -= delete_some(session, table, *conditions, most=left)
                if left <= 0:
                    return False
            forget_events(session, run, attempt)
            return True

    def add(self, arrived: list[Arrived]) -> int:
        """Store events; return the number of new ones. Raises FormError."""
        with self._piece() as (session, _, _):
            return len(add_events(session, self._uid, arrived, replacing=True))

    def end(self) -> None:
        """Note which of the given up events are there now, and let others store events again."""
        with self._piece() as (session, _, attempt):
            for source, given in self._given.items():
                mine = (EventSource.attempt_id == attempt.id, EventSource.source == source)
                filled = given.filled + given.dropped - EventSource.dropped
                session.execute(update(EventSource).where(*mine).values(filled=filled))
            attempt.replacing_at = None

    @contextmanager
    def _piece(self) -> Iterator[tuple[Session, Run, Attempt]]:
        with self._database.writing() as session:
            run, _, attempt = locked(session, self._uid)
            if attempt.replacing_at != self._stamp:
                raise ReplacingError("another import of this attempt has taken over")
            stamp = attempt.replacing_at = time.time()
            yield session, run, attempt
        self._stamp = stamp


def _grown(run: Run, attempt: Attempt) -> Iterator[tuple[Any, ...]]:
    """Yield the tables with many rows of the attempt, each with the conditions that find them by an index."""
    yield RawEvent, RawEvent.attempt_id == attempt.id
    for table in (*_OF_STEPS, SystemRow):
        mine = [table.run_id == run.id, table.attempt_id == attempt.id]
        if table is not SystemRow and attempt.first_step is not None:
            mine.append(table.step >= attempt.first_step)
        yield table, *mine
