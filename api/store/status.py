"""The legal lives of a run: pure. What moves a run from one status to another, and what may not.

    queued -> starting -> running -> (stopping ->) stopped | succeeded | failed | crashed | lost

Invariants: only `TRANSITIONS` are made; an ended run stays ended (resuming makes a new attempt, with a status of its
own); `lost` is the one ending that can be taken back, because it says only that nothing was heard.
"""

from __future__ import annotations

from typing import Literal, get_args

RunStatus = Literal["queued", "starting", "running", "stopping", "stopped", "succeeded", "failed", "crashed", "lost"]
RUN_STATUSES: tuple[str, ...] = get_args(RunStatus)

# succeeded, failed, stopped: the run itself said so. crashed: its job or process ended without a word. lost: neither
# the run nor its job could be asked for a long time.
ENDED = frozenset({"stopped", "succeeded", "failed", "crashed", "lost"})
ACTIVE = frozenset(RUN_STATUSES) - ENDED
# A run that succeeded has nothing left to do, and one that is lost may still be there.
RESUMABLE = ENDED - {"succeeded", "lost"}

TRANSITIONS: dict[str, frozenset[str]] = {
    "queued": frozenset({"starting", "stopped", "failed"}),
    "starting": frozenset({"running", "stopping", "stopped", "succeeded", "failed", "crashed", "lost"}),
    "running": frozenset({"stopping", "stopped", "succeeded", "failed", "crashed", "lost"}),
    # A run that was asked to stop may end by itself first.
    "stopping": frozenset({"stopped", "succeeded", "failed", "crashed", "lost"}),
    # It is heard of again: a partition, or a server that was down.
    "lost": frozenset({"running", "stopping", "stopped", "succeeded", "failed", "crashed"}),
    "stopped": frozenset(),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "crashed": frozenset(),
}


class StatusError(ValueError):
    """A change of status that is not legal; the message names both."""


def change(current: RunStatus, wanted: RunStatus) -> RunStatus:
    """`wanted`, if `current` may become it (or is it already). Raises StatusError."""
    if wanted != current and wanted not in TRANSITIONS[current]:
        raise StatusError(f"a run that is {current} cannot become {wanted}")
    return wanted
