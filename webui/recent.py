"""What the latest steps say: how a figure changed, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.models import Run
from rhyme_openrlhf.api.record import Step

# Steps that are compared with as many before them: enough that single steps do not decide, few enough to be news.
RECENT = 10


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
