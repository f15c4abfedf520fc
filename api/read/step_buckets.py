"""Steps summed into at most so many buckets of equally many steps, for bars and stacks: computed by the database.

Down-sampling keeps points of a curve; what is stacked needs sums of the same steps instead. A share of a bucket is the
sum of its parts over the sum of its wholes, as `telemetry/metrics.py` defines it over any stretch.
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
    """Steps `first` to `last`: engine seconds in all, bubbles by column of `steps`, mean unix seconds at their ends."""

    first: int
    last: int
    ended_at: float | None
    engine_seconds: float
    bubbles: dict[str, float]


def bucket_width(first: int, last: int, most: int) -> int:
    """Steps of a bucket, so that `first` to `last` make at most `most` of them."""
    return max(1, -(-(last - first + 1) // most))


def bubble_buckets(session: Session, run: Run, from_step: int, to_step: int, most: int) -> list[BubbleBucket]:
    """The run's steps that have a timeline, in order. A step without intervals has no bubbles, not none of them."""
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
