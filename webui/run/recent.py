"""Figures of the latest steps: recent changes, remaining time, and the start phase before the first step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.run_json import RunSummary
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import RawEvent, Step, of_kinds
from rhyme_openrlhf.telemetry.event_json import parse
from rhyme_openrlhf.telemetry.events import Event
from rhyme_openrlhf.telemetry.progress_state import START_EVENTS, start_phase

# Number of steps compared with as many before them: enough to average out single steps, few enough to be recent.
RECENT = 10
# Most events read for the start phases of runs; a run of a thousand engines has a little more than a thousand.
MOST_START_EVENTS = 5000


@dataclass(frozen=True)
class Change:
    """The difference between the mean of the last `steps` values and the mean of the `steps` values before."""

    by: float
    steps: int


def recent_change(values: Sequence[float | None]) -> Change | None:
    """Return the change over the last `RECENT` values, or over the newer half if there are fewer than twice as many.

    Return None if there are fewer than four values.
    """
    known = [value for value in values if value is not None][-2 * RECENT :]
    half = len(known) // 2
    if half < 2:
        return None
    return Change(fmean(known[half:][-half:]) - fmean(known[:half]), half)


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
    """Return the start phase (`start_phase`) of each started run that has no finished step yet, by uid."""
    found: dict[str, list[Event]] = defaultdict(list)
    # A run with status "starting" has reported nothing yet; its recorded events belong to an earlier attempt.
    uids = [run.uid for run in runs if run.status == "running" and run.step == 0]
    if uids:
        rows = session.execute(
            select(Run.uid, RawEvent)
            .join(RawEvent, RawEvent.run_id == Run.id)
            .where(Run.uid.in_(uids), *of_kinds([one.kind for one in START_EVENTS]))
            .order_by(RawEvent.id.desc())
            .limit(MOST_START_EVENTS)
        ).all()
        for uid, row in reversed(rows):
            envelope = {"kind": row.kind, "time": row.time, "source": row.source, "sequence": row.sequence}
            if recorded := parse({**json.loads(row.body), **envelope}):
                found[uid].append(recorded.event)
    return {
        run.uid: start_phase(found[run.uid]) for run in runs if run.status in ("starting", "running") and run.step == 0
    }
