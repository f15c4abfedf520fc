"""Status changes of attempts and runs, caused by an attempt's events and its reporter.

Invariants: only changes that `status.py` allows are made. Others are ignored, because events may come late: a run that
has ended for another reason stays ended. A run has the status of its newest attempt. Webhooks have the message of an
end in the transaction that makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session, load_only

from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.status import ACTIVE, ENDED, TRANSITIONS
from rhyme_openrlhf.api.store.webhooks import note_end

SILENT_END = "the run's process ended without a reason"


def lock_run(session: Session, run_id: int) -> tuple[Run, list[Attempt]]:
    """Return the run and its attempts in order, locked until the transaction ends.

    Every writer of a run or an attempt calls this first, so that two writers never deadlock. Columns that a batch does
    not need are loaded when used.
    """
    columns = load_only(
        Run.status, Run.message, Run.started_at, Run.finished_at, Run.engines, Run.last_event_at, Run.dropped_events,
        Run.origin, Run.reporter_id,
    )  # fmt: skip
    run = session.execute(select(Run).where(Run.id == run_id).options(columns).with_for_update()).scalar_one()
    attempts = session.execute(select(Attempt).where(Attempt.run_id == run_id).order_by(Attempt.number)).scalars()
    return run, list(attempts)


def move(run: Run, attempts: Sequence[Attempt], attempt: Attempt, status: str, message: str, time: float) -> bool:
    """Set the attempt's status if that is legal, and update its run; return whether it was legal.

    `time` (unix seconds): the end, for a status that is an end.
    """
    if status != attempt.status and status not in TRANSITIONS[attempt.status]:
        return False
    ends = status in ENDED and status != attempt.status
    attempt.status = status
    attempt.message = message
    attempt.finished_at = time if status in ENDED else None
    follow(run, attempts)
    if ends and attempt is attempts[-1]:
        note_end(run, attempt, time)
    return True


def follow(run: Run, attempts: Sequence[Attempt]) -> None:
    """Update the run's status and times from its attempts."""
    newest = attempts[-1]
    run.status, run.message, run.finished_at = newest.status, newest.message, newest.finished_at
    starts = [attempt.started_at for attempt in attempts if attempt.started_at is not None]
    run.started_at = min(starts, default=None)
    run.paused_seconds = _paused_seconds(attempts)
    run.paused_at = _paused_at(attempts)


def _paused_seconds(attempts: Sequence[Attempt]) -> float:
    """Return the seconds between the ends of attempts and the starts of the next ones; an unknown end has none.

    A last attempt that ended before it started worked at no time.
    """
    started = [attempt for attempt in attempts if attempt.started_at is not None]
    newest, unstarted = attempts[-1], 0.0
    if started and newest.started_at is None and newest.finished_at is not None:
        unstarted = max(0.0, newest.finished_at - (started[-1].finished_at or newest.finished_at))
    return unstarted + sum(
        max(0.0, (following.started_at or 0.0) - attempt.finished_at)
        for attempt, following in itertools.pairwise(started)
        if attempt.finished_at is not None
    )


def _paused_at(attempts: Sequence[Attempt]) -> float | None:
    """Return when the last attempt that started ended, if a newer one waits for its start; else None."""
    newest = attempts[-1]
    if newest.started_at is not None or newest.finished_at is not None:
        return None
    return max((one.finished_at for one in attempts if one.started_at and one.finished_at), default=None)


def began(run: Run, attempts: Sequence[Attempt], attempt: Attempt, time: float) -> None:
    """Mark the attempt as running since `time`, when its RunStarted arrived."""
    attempt.started_at = time
    if attempt.status == "queued":  # the service that started it has not yet reported so
        move(run, attempts, attempt, "starting", "", time)
    if attempt.status == "starting":
        move(run, attempts, attempt, "running", "", time)
    follow(run, attempts)


def heard(run: Run, attempts: Sequence[Attempt], attempt: Attempt, alive: bool | None, now: float) -> None:
    """Note a message of the attempt's reporter.

    `alive`: whether the driver's process exists; False comes only with the last events.
    """
    attempt.heartbeat_at = now
    if alive is False and attempt.status in ACTIVE - {"queued"}:
        move(run, attempts, attempt, "crashed", SILENT_END, now)
    elif attempt.status == "lost":
        again = "running" if attempt.stop_requested_at is None else "stopping"
        move(run, attempts, attempt, again if alive is not False else "crashed", "", now)
