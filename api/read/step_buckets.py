"""Steps summed in a limited number of equally wide buckets, for bars and stacks; the database computes the sums.

Down-sampling keeps points of a curve, but stacked values need sums over the same steps. A bucket's share is the sum of
its parts divided by the sum of its wholes, as `telemetry/metrics.py` defines it over any stretch.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.api.store.step_figures import BUBBLES


@dataclass(frozen=True)
class BubbleBucket:
    """Steps `first` to `last`: engine seconds, bubbles by column of `steps`, and the mean end in unix seconds."""

    first: int
    last: int
    ended_at: float | None
    engine_seconds: float
    bubbles: dict[str, float]


def bucket_width(first: int, last: int, most: int) -> int:
    """Return the steps per bucket, so that `first` to `last` make at most `most` buckets."""
    return max(1, -(-(last - first + 1) // most))


def bubble_buckets(session: Session, run: Run, from_step: int, to_step: int, most: int) -> list[BubbleBucket]:
    """Return buckets of the run's steps that have a timeline, in order.

    A step without intervals is left out, because its bubbles are unknown, not zero.
    """
    window = (Step.run_id == run.id, Step.step >= from_step, Step.step <= to_step)
    first, last = session.execute(select(func.min(Step.step), func.max(Step.step)).where(*window)).one()
    if first is None:
        return []
    bucket = (Step.step - first) // bucket_width(first, last, most)
    sums = [func.sum(getattr(Step, name)) for name in BUBBLES]
    rows = session.execute(
        select(
            func.min(Step.step),
            func.max(Step.step),
            func.avg(Step.finished_at),
            func.sum(Step.engines * Step.rollout_seconds),
            *sums,
        )
        .where(*window, Step.intervals > 0, Step.rollout_seconds.is_not(None))
        .group_by(bucket)
        .order_by(func.min(Step.step))
    ).all()
    return [
        BubbleBucket(row[0], row[1], row[2], float(row[3] or 0.0), dict(zip(BUBBLES, map(float, row[4:]), strict=True)))
        for row in rows
    ]
