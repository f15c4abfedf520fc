"""vLLM's queues of requests and its limit of running requests, by the names that the installed version has.

A scheduler plug-in takes a request out of vLLM's queues, puts it back, and holds seats for requests that are to come.
vLLM offers no way to do so, and its queues differ:

| version | requests that wait | limit of running requests |
|---|---|---|
| 0.29.0 | `waiting`; `skipped_waiting`: was skipped, or cannot be scheduled yet | `max_num_running_reqs` |
| 0.32.0 | `waiting`; `kv_holding_waiting`: holds KV blocks; `deferred_waiting` marks which of both were skipped | \
`max_num_active_reqs` |

In 0.32.0 `max_num_running_reqs` is the number of the model runner's slots, and no limit of admission.

Invariants: a request is in the queue that vLLM takes it from, or in none; requests that vLLM schedules earlier than
others are first in their queue. Checked against vLLM 0.29.0 and 0.32.0 `v1/core/sched/scheduler.py`; contract test:
`tests/engine/patches/test_queues.py`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


def seats(scheduler: Scheduler) -> int:
    """Return how many requests may run at once."""
    return int(getattr(scheduler, _limit(scheduler)))


def hold_seats(scheduler: Scheduler, count: int) -> None:
    """Let `count` requests fewer run at once; a negative count gives seats back."""
    setattr(scheduler, _limit(scheduler), seats(scheduler) - count)


def take_out(scheduler: Scheduler, request: Request) -> bool:
    """Take an unfinished request out of its queue, so that no step schedules it; returns whether the request ran."""
    ran = request.status == RequestStatus.RUNNING
    if ran:
        scheduler.running.remove(request)
    else:
        for queue in _waiting_queues(scheduler):
            queue.remove_requests([request])
        if hasattr(scheduler, "deferred_waiting"):
            scheduler.deferred_waiting.discard(request)
    return ran


def put_back(scheduler: Scheduler, request: Request) -> None:
    """Schedule a request again that was taken out: as the last of those that run, or the first of those that wait."""
    if request.status == RequestStatus.RUNNING:
        scheduler.running.append(request)
    elif hasattr(scheduler, "kv_holding_waiting") and scheduler._holds_kv_blocks(request):
        scheduler.kv_holding_waiting.prepend_request(request)
    else:
        scheduler.waiting.prepend_request(request)


def put_first(scheduler: Scheduler, request: Request) -> None:
    """Make a waiting request the first of its queue."""
    queue = next(queue for queue in _waiting_queues(scheduler) if request in queue)
    queue.remove_request(request)
    queue.prepend_request(request)


def gave_up_kv(scheduler: Scheduler, request: Request) -> None:
    """Have a request whose KV blocks were freed wait among those without any, if the request waits."""
    holding: Any = getattr(scheduler, "kv_holding_waiting", ())
    if request in holding:
        holding.remove_request(request)
        scheduler.waiting.prepend_request(request)


def _limit(scheduler: Scheduler) -> str:
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def _waiting_queues(scheduler: Scheduler) -> list[Any]:
    names = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return [getattr(scheduler, name) for name in names if hasattr(scheduler, name)]
