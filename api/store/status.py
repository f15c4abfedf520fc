"""Legal changes of a run's status: pure.

    queued -> starting -> running -> (stopping ->) stopped | succeeded | failed | crashed | lost

Invariants: only changes in `TRANSITIONS` are made. An ended run stays ended (resuming creates a new attempt with its
own status). `lost` is the only end that can be taken back, because it only means that nothing was heard.
"""

from __future__ import annotations

from typing import Literal, get_args

RunStatus = Literal["queued", "starting", "running", "stopping", "stopped", "succeeded", "failed", "crashed", "lost"]
RUN_STATUSES: tuple[str, ...] = get_args(RunStatus)

# succeeded, failed, stopped: reported by the run itself. crashed: its job or process ended without a report. lost:
# neither the run nor its job has responded for a long time.
ENDED = frozenset({"stopped", "succeeded", "failed", "crashed", "lost"})
ACTIVE = frozenset(RUN_STATUSES) - ENDED
# What may still run, and so is asked to stop and may report again: nobody has heard of a lost run.
PERHAPS_ACTIVE = ACTIVE | {"lost"}
# A run that succeeded has no steps left, and a lost one may still be active.
RESUMABLE = ENDED - {"succeeded", "lost"}

TRANSITIONS: dict[str, frozenset[str]] = {
    "queued": frozenset({"starting", "stopped", "failed"}),
    "starting": frozenset({"running", "stopping", "stopped", "succeeded", "failed", "crashed", "lost"}),
    "running": frozenset({"stopping", "stopped", "succeeded", "failed", "crashed", "lost"}),
    # A run that was asked to stop may end by itself first.
    "stopping": frozenset({"stopped", "succeeded", "failed", "crashed", "lost"}),
    # The run reports again, after a network partition or a stopped server.
    "lost": frozenset({"running", "stopping", "stopped", "succeeded", "failed", "crashed"}),
    "stopped": frozenset(),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "crashed": frozenset(),
}
