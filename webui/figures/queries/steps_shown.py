"""The steps that figures of single intervals or samples show."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Interval, Step
from rhyme_openrlhf.webui.figures.run_figure import StepsShown


def newest_step(session: Session, run: Run) -> int:
    """Return the newest step with reports of engines, else the newest step, else 0."""
    reported = session.scalar(select(func.max(Interval.step)).where(Interval.run_id == run.id))
    if reported is not None:
        return reported
    return session.scalar(select(func.max(Step.step)).where(Step.run_id == run.id)) or 0


def shown_steps(session: Session, run: Run, options: StepsShown) -> tuple[int, int]:
    """Return the first and the last step of the window."""
    last = options.step if options.step is not None else newest_step(session, run)
    return max(1, last - options.steps + 1), last
