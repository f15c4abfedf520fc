"""Figures of the latest steps: recent changes, remaining time, and the start phase before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.phases import phases_of
from rhyme_openrlhf.api.read.run_json import RunSummary
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.telemetry.metrics import ERRORS

# Number of steps compared with as many before them: enough to average out single steps, few enough to be recent.
RECENT = 10


@dataclass(frozen=True)
class Change:
    """The difference between the mean of the last `steps` values and the mean of the `steps` values before.

    `is_clear`: it is more than the noise of these values.
    """

    by: float
    steps: int
    is_clear: bool


def recent_change(values: Sequence[float | None]) -> Change | None:
    """Return the change over the last `RECENT` values, or over the newer half if there are fewer than twice as many.

    Return None if there are fewer than four values.
    """
    known = [value for value in values if value is not None][-2 * RECENT :]
    half = len(known) // 2
    if half < 2:
        return None
    before, after = known[:half], known[-half:]
    by = fmean(after) - fmean(before)
    return Change(by, half, abs(by) > ERRORS * math.sqrt((variance(before) + variance(after)) / half))


def step_ends(session: Session, run: Run) -> list[tuple[int, float]]:
    """Return (step, unix seconds at its end) of the latest finished steps, the oldest first."""
    rows = session.execute(
        select(Step.step, Step.finished_at)
        .where(Step.run_id == run.id, Step.finished_at.is_not(None))
        .order_by(Step.step.desc())
        .limit(2 * RECENT)
    ).all()
    return [(step, finished) for step, finished in reversed(rows) if finished is not None]


def seconds_left(ends: Sequence[tuple[int, float]], steps_total: int | None) -> float | None:
    """Return the remaining seconds at the pace of these steps, or None if the pace or the last step is unknown."""
    if steps_total is None or len(ends) < 2 or ends[-1][0] <= ends[0][0]:
        return None
    pace = (ends[-1][1] - ends[0][1]) / (ends[-1][0] - ends[0][0])
    return max(0.0, pace * (steps_total - ends[-1][0]))


def start_phases(session: Session, runs: Sequence[RunSummary]) -> dict[str, str]:
    """Return what each started run without a finished step is doing, by uid."""
    started = [run.uid for run in runs if run.status in ("starting", "running") and run.step == 0]
    return {
        uid: " · ".join(phase.label for phase in phases_of(session, find_run(session, uid), usual=False))
        for uid in started
    }
