"""Queries of a run's raw events: the existing kinds and sources, and events that match a filter.

A note states its own level; a process that died and a run that failed are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, exists, or_, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.pagination import Direction, Order, page_of
from rhyme_openrlhf.api.store.lookup import find_attempt
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.record import FREQUENT_KINDS, EventSource, RawEvent, of_kinds
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, Note, ProcessDied, RunFinished

Level = Literal["info", "warning", "error"]
EVENT_KINDS: tuple[str, ...] = tuple(one.kind for one in EVENT_CLASSES)
_WITH_LEVEL = (Note.kind, RunFinished.kind, ProcessDied.kind)


@dataclass(frozen=True)
class EventFilter:
    """A filter; an empty tuple or None matches everything. `attempt` is a number."""

    kinds: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    attempt: int | None = None
    level: Level | None = None

    def conditions(self, session: Session, run: Run) -> list[Any]:
        """Return the SQL conditions. Raises NotFoundError if the run has no such attempt."""
        found: list[Any] = [RawEvent.run_id == run.id]
        if self.kinds:
            found += _of_kinds(run, self.kinds)
        if self.sources:
            found.append(RawEvent.source.in_(self.sources))
        if self.attempt is not None:
            found.append(RawEvent.attempt_id == find_attempt(session, run, self.attempt).id)
        if self.level is not None:
            found += [*_of_kinds(run, _WITH_LEVEL), _of_level(self.level)]
        return found


def _of_kinds(run: Run, kinds: Sequence[str]) -> list[Any]:
    """Return the conditions of `of_kinds`; several rare kinds use a subquery on ids.

    Otherwise, SQLite would search all of the run's events for them.
    """
    conditions: list[Any] = of_kinds(kinds)
    if len(kinds) == 1 or set(kinds) & set(FREQUENT_KINDS):
        return conditions
    return [RawEvent.id.in_(select(RawEvent.id).where(RawEvent.run_id == run.id, *conditions))]


def _of_level(level: Level) -> ColumnElement[bool]:
    # Quotes inside a JSON string are escaped, so no text can look like the field.
    noted = and_(RawEvent.kind == Note.kind, RawEvent.body.contains(f'"level":"{level}"', autoescape=True))
    if level != "error":
        return noted
    failed = and_(RawEvent.kind == RunFinished.kind, RawEvent.body.contains('"status":"failed"', autoescape=True))
    return or_(noted, failed, RawEvent.kind == ProcessDied.kind)


def find_events(
    session: Session, run: Run, wanted: EventFilter, direction: Direction, limit: int, cursor: str | None
) -> tuple[list[tuple[RawEvent, int]], str | None]:
    """Return one page of (event, attempt number) in the order of storing, and the next page's cursor."""
    order = Order("id", RawEvent.id, RawEvent.id, direction)
    rows, following = page_of(session, RawEvent, wanted.conditions(session, run), order, limit, cursor)
    attempts = select(Attempt.id, Attempt.number).where(Attempt.run_id == run.id)
    numbers = dict(session.execute(attempts).tuples().all())
    # Without a snapshot, the run may be deleted between the two queries.
    return [(row, numbers[row.attempt_id]) for row in rows if row.attempt_id in numbers], following


def kinds_of(session: Session, run: Run) -> list[str]:
    """Return the known kinds of the run's events; frequent kinds are always included, because no index finds them."""
    rare = [kind for kind in EVENT_KINDS if kind not in FREQUENT_KINDS]
    # One index lookup per kind, instead of reading the whole index.
    asked: Sequence[Any] = [exists().where(RawEvent.run_id == run.id, *of_kinds([kind])).label(kind) for kind in rare]
    found = session.execute(select(*asked)).one()
    return [*FREQUENT_KINDS, *(kind for kind, is_there in zip(rare, found, strict=True) if is_there)]


def sources_of(session: Session, run: Run) -> list[str]:
    """Return the sources of the run's events, by name."""
    query = (
        select(EventSource.source)
        .join(Attempt, Attempt.id == EventSource.attempt_id)
        .where(Attempt.run_id == run.id)
        .distinct()
        .order_by(EventSource.source)
    )
    return list(session.scalars(query))
