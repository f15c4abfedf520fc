"""Deletion of a run with everything it reported, in short transactions that do not block the store; or of an attempt.

Invariant: the run's own row is deleted last, so an interrupted deletion can be repeated.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, update
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest import store_batch
from rhyme_openrlhf.api.ingest.replacement import CHUNK, delete_some
from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.lookup import find_attempt, find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import (
    CurveBlock,
    EngineSampleRow,
    EngineStepRow,
    Interval,
    Metric,
    Move,
    RawEvent,
    Step,
    Switch,
    SystemRow,
)
from rhyme_openrlhf.api.store.status import ENDED


class DeletionRefusedError(Exception):
    """The run or attempt cannot be deleted in its current state; the message is one sentence for people."""


# Tables that grow with a run's length and have no foreign keys; the others follow the run's row (ON DELETE CASCADE).
LARGE_TABLES: tuple[Any, ...] = (
    RawEvent, Interval, EngineSampleRow, EngineStepRow, CurveBlock, Metric, Move, Switch, Step, SystemRow,
)  # fmt: skip


def delete_run(database: Database, uid: str) -> None:
    """Delete an archived run that has ended. Raises NotFoundError, DeletionRefusedError."""
    with database.writing() as session:
        run_id = _deletable(session, uid).id
    for table in LARGE_TABLES:
        done = CHUNK
        while done == CHUNK:
            with database.writing() as session:
                done = delete_some(session, table, table.run_id == run_id, most=CHUNK)
    with database.writing() as session:
        # Check again, because a user may have restored the run meanwhile.
        run = _deletable(session, uid)
        # A batch may have arrived meanwhile; none can arrive now, because the run is locked.
        for table in LARGE_TABLES:
            session.execute(delete(table).where(table.run_id == run.id))
        # Clones stay, without a parent.
        session.execute(update(Run).where(Run.parent_id == run.id).values(parent_id=None))
        session.execute(delete(Run).where(Run.id == run.id))


def remove_attempt(database: Database, uid: str, number: int) -> int:
    """Remove one attempt of a run; return the run's row number. Raises NotFoundError, DeletionRefusedError."""
    with database.writing() as session:
        run, attempts = run_status.lock_run(session, find_run(session, uid).id)
        attempt = find_attempt(session, run, number)
        if attempt.submission_id is not None:
            raise DeletionRefusedError("the service started this attempt: it cannot be removed")
        if len(attempts) == 1:
            raise DeletionRefusedError("the run has no other attempt: delete the run")
        store_batch.remove_attempts(session, run, attempts, [attempt])
        return run.id


def _deletable(session: Session, uid: str) -> Run:
    run = find_run(session, uid, lock=True)
    if run.status not in ENDED:
        raise DeletionRefusedError(f"the run is {run.status}: stop it first")
    if run.archived_at is None:
        raise DeletionRefusedError("archive the run first: deleting cannot be undone")
    return run
