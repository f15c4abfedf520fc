"""The state of the queue: active runs of this service, waiting runs, and their reasons for waiting. Only reads."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.launch.queueing import Queued, used_by_others, waits
from rhyme_openrlhf.api.launch.spec import gpus_needed
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.status import ACTIVE


@dataclass(frozen=True)
class QueuedRun:
    """A run in the queue, or an active one (`position` 0 and no `why`)."""

    uid: str
    name: str
    status: str
    gpus: int
    since: float
    position: int = 0
    why: str = ""
    # True if it has GPUs of another cluster than this service's.
    elsewhere: bool = False


@dataclass(frozen=True)
class QueueState:
    """The queue. `active`: runs that have their GPUs; `waiting`: in starting order."""

    active: list[QueuedRun]
    waiting: list[QueuedRun]

    @property
    def gpus_taken(self) -> int:
        """GPUs of this service's cluster that active runs requested."""
        return sum(run.gpus for run in self.active if not run.elsewhere)


def queue_state(
    session: Session, total_gpus: int | None, used_gpus: int, max_runs: int, cluster: str = ""
) -> QueueState:
    """Return the queue with the dispatcher's order and counts.

    `total_gpus`: GPUs of the `cluster`, None while it does not respond; `used_gpus`: those that any job has.
    """
    rows = session.execute(
        select(Attempt, Run)
        .join(Run, Run.id == Attempt.run_id)
        .where(Attempt.status.in_(ACTIVE), Attempt.submission_id.is_not(None))
        .order_by(Attempt.queued_at, Attempt.id)
    ).tuples()
    active: list[QueuedRun] = []
    queued: list[tuple[Attempt, Run, int]] = []
    for attempt, run in rows:
        gpus = gpus_needed(run.spec["arguments"]) if run.spec is not None else 0
        if attempt.status == "queued":
            queued.append((attempt, run, gpus))
        else:
            since = attempt.started_at or attempt.queued_at
            elsewhere = attempt.cluster not in (None, cluster)
            active.append(QueuedRun(run.uid, run.name, attempt.status, gpus, since, elsewhere=elsewhere))
    entries = [Queued(attempt.id, gpus) for attempt, _, gpus in queued]
    ours = [run for run in active if not run.elsewhere]
    others = used_by_others(used_gpus, [run.gpus for run in ours if run.status in ("running", "stopping")])
    found = waits(entries, [run.gpus for run in ours], total_gpus, max_runs, others)
    waiting = [
        QueuedRun(run.uid, run.name, "queued", gpus, attempt.queued_at, wait.position, wait.why)
        for (attempt, run, gpus), wait in zip(queued, found, strict=True)
    ]
    return QueueState(active, waiting)
