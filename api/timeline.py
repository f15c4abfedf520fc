"""The bubble timeline: what engines did in a window of steps, some engines at a time.

Invariant: no answer has more than `MAX_LANES` engines and the asked number of intervals, whatever the cluster's size;
what was left out is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Float, cast, func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.models import Run
from rhyme_openrlhf.api.record import Interval

# Lanes that a page can draw and a person can read at once.
MAX_LANES = 256


@dataclass(frozen=True)
class Lane:
    """One engine in the window: its intervals in the order of time, and its seconds with nothing to run."""

    engine: int
    bubble_seconds: float
    intervals: list[Interval]


@dataclass(frozen=True)
class Timeline:
    """`engines`: how many have intervals in the window; `truncated`: more intervals were there than asked for."""

    lanes: list[Lane]
    engines: int
    truncated: bool


def timeline(
    session: Session,
    run: Run,
    from_step: int,
    to_step: int,
    chosen: Sequence[int] | None,
    worst: int,
    limit: int,
) -> Timeline:
    """Lanes of the `chosen` engines, else of the `worst` ones (most bubble time first); at most `limit` intervals."""
    window = (Interval.run_id == run.id, Interval.step >= from_step, Interval.step <= to_step)
    length = cast(Interval.end - Interval.start, Float)
    bubble = func.coalesce(func.sum(length).filter(Interval.state != "generate"), 0.0)
    ranking = select(Interval.engine, bubble, func.count().over()).where(*window).group_by(Interval.engine)
    if chosen is not None:
        ranking = ranking.where(Interval.engine.in_(chosen)).order_by(Interval.engine)
    else:
        ranking = ranking.order_by(bubble.desc(), Interval.engine)
    ranked = session.execute(ranking.limit(worst)).all()
    lanes = {engine: Lane(engine, seconds, []) for engine, seconds, _ in ranked}
    if chosen is None:
        # How many groups there were before the limit.
        engines = ranked[0][2] if ranked else 0
    else:
        engines = session.scalar(select(func.count(Interval.engine.distinct())).where(*window)) or 0
    rows = session.scalars(
        select(Interval)
        .where(*window, Interval.engine.in_(lanes))
        .order_by(Interval.start, Interval.id)
        .limit(limit + 1)
    ).all()
    for row in rows[:limit]:
        lanes[row.engine].intervals.append(row)
    return Timeline(list(lanes.values()), engines, len(rows) > limit)
