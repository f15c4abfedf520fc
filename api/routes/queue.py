"""Routes for the queue of runs, with the reason why each waits, and for the service that starts them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import NO_CLUSTER, LaunchingDep
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.launch.lease import NOBODY, find_holder, not_dispatching
from rhyme_openrlhf.api.launch.queue_state import queue_state
from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable
from rhyme_openrlhf.api.store.bounds import View

router = APIRouter(tags=["launching"], responses=documented(401, 403, 422, 429, 503))


class QueuedRunView(View):
    """A run that waits, or one that has its GPUs."""

    uid: str
    name: str
    status: str
    gpus: int = Field(description="GPUs that it needs.")
    since: float = Field(description="Unix seconds: when it began to wait, or to run.")
    position: int = Field(description="Its place in the queue from 1; 0 if it does not wait.")
    why: str = Field(description="What it waits for; empty if it does not wait.")


_QUEUE_EXAMPLE: dict[str, Any] = {
    "gpus": 8,
    "max_runs": 8,
    "message": "",
    "active": [
        {
            "uid": "0" * 32,
            "name": "first",
            "status": "running",
            "gpus": 6,
            "since": 1760000000.0,
            "position": 0,
            "why": "",
        }
    ],
    "waiting": [
        {
            "uid": "1" * 32,
            "name": "second",
            "status": "queued",
            "gpus": 4,
            "since": 1760000100.0,
            "position": 1,
            "why": "it needs 4 GPUs, and 2 of 8 are free",
        }
    ],
}


class QueueView(BaseModel):
    """The queue as this service sees it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_QUEUE_EXAMPLE]})

    gpus: int | None = Field(description="GPUs of the cluster; null while it does not respond, or without a cluster.")
    max_runs: int = Field(description="Most runs that are active at once.")
    message: str = Field(description="Why this service starts no runs now; empty if it does.")
    active: list[QueuedRunView]
    waiting: list[QueuedRunView] = Field(description="In the order in which they start.")


class DispatcherView(BaseModel):
    """The service on this database that starts, watches and stops runs."""

    here: bool = Field(description="True if it is the responding service.")
    host: str | None = Field(description="Its host name; null while no service dispatches.")
    pid: int | None
    since: float | None = Field(description="Unix seconds, by its clock.")
    message: str = Field(description="The same in one sentence; empty if it is the responding service.")


@router.get("/queue", summary="Queue of runs")
def get_queue(who: auth.Viewer, service: ServiceDep, launching: LaunchingDep) -> QueueView:
    """Return the waiting runs with what each waits for, and the runs that have their GPUs."""
    total, used, message = None, 0, NO_CLUSTER
    if launching.launcher is not None:
        try:
            total, used, message = launching.launcher.gpus(), launching.launcher.used_gpus(), ""
        except ClusterUnreachable as error:
            message = str(error)
    with service.database.reading() as session:
        queue = queue_state(session, total, used, launching.settings.max_runs, launching.cluster)
        holder = find_holder(session)
    waiting = [QueuedRunView.model_validate(run) for run in queue.waiting]
    if launching.launcher is None:
        waiting = [run.model_copy(update={"why": NO_CLUSTER}) for run in waiting]
    return QueueView(
        gpus=total,
        max_runs=launching.settings.max_runs,
        message=message or not_dispatching(holder, service.uid),
        active=[QueuedRunView.model_validate(run) for run in queue.active],
        waiting=waiting,
    )


@router.get("/dispatcher", summary="Which service starts runs")
def get_dispatcher(who: auth.Viewer, service: ServiceDep) -> DispatcherView:
    """Return which of several services on one database starts queued runs; the others only add runs to the queue."""
    with service.database.reading(snapshot=False) as session:
        holder = find_holder(session)
    message = not_dispatching(holder, service.uid)
    if holder is None or holder.service == NOBODY:
        return DispatcherView(here=False, host=None, pid=None, since=None, message=message)
    here = holder.service == service.uid
    return DispatcherView(here=here, host=holder.host, pid=holder.pid, since=holder.since, message=message)
