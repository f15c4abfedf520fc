"""Lookup of runs, attempts and experiments by their public names."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Attempt, Experiment, Run


class NotFoundError(LookupError):
    """A row that does not exist; the message is one sentence for people."""

    def __init__(self, what: str, name: object) -> None:
        super().__init__(f"there is no {what} {name}")


def find_run(session: Session, uid: str, lock: bool = False) -> Run:
    """Return a run. With `lock`, no other transaction changes it until this one ends. Raises NotFoundError."""
    query = select(Run).where(Run.uid == uid)
    run = session.scalar(query.with_for_update() if lock else query)
    if run is None:
        raise NotFoundError("run", uid)
    return run


def of_run(table: Any, uid: str) -> ColumnElement[bool]:
    """Return the condition for rows of this run, without a separate query; it matches nothing if the run is missing."""
    condition: ColumnElement[bool] = table.run_id == select(Run.id).where(Run.uid == uid).scalar_subquery()
    return condition


def find_attempt(session: Session, run: Run, number: int) -> Attempt:
    """Return an attempt of a run. Raises NotFoundError."""
    attempt = session.scalar(select(Attempt).where(Attempt.run_id == run.id, Attempt.number == number))
    if attempt is None:
        raise NotFoundError(f"attempt of run {run.uid}:", number)
    return attempt


def find_experiment(session: Session, which: int | str, lock: bool = False) -> Experiment:
    """Return the experiment with this id or name; `lock` as for `find_run`. Raises NotFoundError."""
    column = Experiment.id if isinstance(which, int) else Experiment.name
    query = select(Experiment).where(column == which)
    experiment = session.scalar(query.with_for_update() if lock else query)
    if experiment is None:
        raise NotFoundError("experiment" if isinstance(which, int) else "experiment named", which)
    return experiment
