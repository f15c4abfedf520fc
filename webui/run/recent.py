"""What the latest steps say: how a figure changed, how long the rest will take, and what is done before the first."""

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

# Steps that are compared with as many before them: enough that single steps do not decide, few enough to be news.
RECENT = 10
# Events that are read to say what starting runs do: a run of a thousand engines has some more than a thousand.
MOST_START_EVENTS = 5000


@dataclass(frozen=True)
class Change:
    """How far the mean of the last `steps` values is above that of as many before them."""

    by: float
    steps: int


def recent_change(values: Sequence[float | None]) -> Change | None:
    """Of the last `RECENT` values, or of the newer half where there are fewer than twice as many; None below four."""
    known = [value for value in values if value is not None][-2 * RECENT :]
    half = len(known) // 2
    if half < 2:
        return None
    return Change(fmean(known[half:][-half:]) - fmean(known[:half]), half)


def step_ends(session: Session, run: Run) -> list[tuple[int, float]]:
    """(step, unix seconds at its end) of the latest finished steps, oldest first."""
    rows = session.execute(
        select(Step.step, Step.finished_at)
        .where(Step.run_id == run.id, Step.finished_at.is_not(None))
        .order_by(Step.step.desc())
        .limit(2 * RECENT)
    ).all()
    return [(step, finished) for step, finished in reversed(rows) if finished is not None]


def seconds_left(ends: Sequence[tuple[int, float]], steps_total: int | None) -> float | None:
    """At the pace of these steps; None where the pace or the end is not known."""
    if steps_total is None or len(ends) < 2 or ends[-1][0] <= ends[0][0]:
        return None
    pace = (ends[-1][1] - ends[0][1]) / (ends[-1][0] - ends[0][0])
    return max(0.0, pace * (steps_total - ends[-1][0]))


def start_phases(session: Session, runs: Sequence[RunSummary]) -> dict[str, str]:
    """Return, by uid, what those runs do that have been started and have no step yet (`start_phase`)."""
    found: dict[str, list[Event]] = defaultdict(list)
    # A run that is "starting" has told nothing yet; what there is was told by an attempt before.
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
