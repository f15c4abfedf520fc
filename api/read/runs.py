"""Queries of runs. Only reads; the session is the caller's.

`RunFilter` narrows a list of runs; all its conditions must hold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.orm import Session, aliased, defer, selectinload

from rhyme_openrlhf.api.read.earlier_runs import earlier_runs_of
from rhyme_openrlhf.api.read.pagination import Direction, Order, cut
from rhyme_openrlhf.api.read.phases import phases_of
from rhyme_openrlhf.api.read.run_json import RunDetail, RunSummary, run_detail, run_summary
from rhyme_openrlhf.api.read.run_query import Node
from rhyme_openrlhf.api.read.run_values import condition, contains, sorting, values_of
from rhyme_openrlhf.api.read.verdict import verdict_of
from rhyme_openrlhf.api.store.models import Experiment, Run, RunTag

RunSort = Literal[
    "created_at",
    "started_at",
    "finished_at",
    "last_event_at",
    "name",
    "status",
    "origin",
    "step",
    "epoch",
    "reward",
    "tokens_per_second",
    "speculation_rate",
    "bubble_fraction",
]
RUN_SORTS: tuple[str, ...] = get_args(RunSort)
Archived = Literal["no", "yes", "all"]
Origin = Literal["launched", "reported", "imported"]
# Columns that only the pages of a single run show; a list does not read and decode them.
_LONG_COLUMNS = (Run.spec, Run.command, Run.config, Run.versions, Run.notes)


@dataclass(frozen=True)
class RunFilter:
    """A filter. `tags`: all of them; `statuses`, `origins`: any; `text`: in name, notes or uid, ignoring case."""

    statuses: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    experiment: str | None = None
    text: str | None = None
    archived: Archived = "no"
    created_from: float | None = None
    created_to: float | None = None
    query: Node | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions for `where`, with `Experiment` joined."""
        found: list[ColumnElement[bool]] = []
        if self.statuses:
            found.append(Run.status.in_(self.statuses))
        if self.origins:
            found.append(Run.origin.in_(self.origins))
        for tag in self.tags:
            found.append(select(RunTag.tag).where(RunTag.run_id == Run.id, RunTag.tag == tag).exists())
        if self.experiment is not None:
            found.append(Experiment.name == self.experiment)
        if self.text:
            found.append(or_(*(contains(column, self.text) for column in (Run.name, Run.notes, Run.uid))))
        if self.archived != "all":
            found.append(Run.archived_at.is_(None) if self.archived == "no" else Run.archived_at.is_not(None))
        if self.created_from is not None:
            found.append(Run.created_at >= self.created_from)
        if self.created_to is not None:
            found.append(Run.created_at <= self.created_to)
        if self.query is not None:
            found.append(condition(self.query))
        return found


def order_of(session: Session, sort: str, direction: Direction) -> Order:
    """Return the order by a field of `RUN_SORTS`, a metric or a setting. Raises QueryError."""
    if sort in RUN_SORTS:
        return Order(sort, getattr(Run, sort), Run.id, direction)
    by = sorting(session, sort)
    return Order(sort, by.expression, Run.id, direction, by.kind)


def list_runs(
    session: Session,
    wanted: RunFilter,
    sort: str,
    direction: Direction,
    limit: int,
    cursor: str | None,
    columns: Sequence[str] = (),
) -> tuple[list[RunSummary], str | None]:
    """Return one page of runs with the values `columns` (`run_values.py`), and the next page's cursor.

    Raises QueryError.
    """
    order = order_of(session, sort, direction)
    parent = aliased(Run)
    query = (
        select(Run, Experiment.name, parent.uid, order.column.label("sorted_by"))
        .outerjoin(Experiment, Experiment.id == Run.experiment_id)
        .outerjoin(parent, parent.id == Run.parent_id)
        .where(*wanted.conditions())
        .options(selectinload(Run.tags), *map(defer, _LONG_COLUMNS))
        .order_by(*order.by())
        .limit(limit + 1)
    )
    if cursor is not None:
        query = query.where(order.after(cursor))
    rows = session.execute(query).all()
    page, following = cut(rows, limit, order, lambda row: (row[3], row[0].id))
    values = values_of(session, [row[0].id for row in page], columns) if columns and page else {}
    items = [run_summary(run, name, uid, values.get(run.id)) for run, name, uid, _ in page]
    return items, following


def names_around(session: Session, run: Run) -> tuple[str | None, str | None]:
    """Return the name of the run's experiment and the uid of its parent."""
    # Most runs have neither, and need no query.
    experiment, parent = None, None
    if run.experiment_id is not None:
        experiment = session.scalar(select(Experiment.name).where(Experiment.id == run.experiment_id))
    if run.parent_id is not None:
        parent = session.scalar(select(Run.uid).where(Run.id == run.parent_id))
    return experiment, parent


def summary_of(session: Session, run: Run) -> RunSummary:
    """Return a run as a list shows it."""
    return run_summary(run, *names_around(session, run))


def detail_of(session: Session, run: Run) -> RunDetail:
    """Return a complete run with its phases and its verdict now."""
    phases, earlier = phases_of(session, run), earlier_runs_of(session, run)
    found = verdict_of(session, run, phases)
    return run_detail(run, *names_around(session, run), phases, earlier, found, time.time())
