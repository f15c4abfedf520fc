"""The bubble timeline: states of engines in a window of steps, for a limited number of engines.

Invariants: a response has at most `MAX_LANES` engines and the requested number of intervals, for clusters of any size,
and says what was left out. It comes from one statement: one round trip and one snapshot. What engines did before the
first rollout of an attempt is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    CTE,
    BindParameter,
    ColumnElement,
    Float,
    Integer,
    ScalarSelect,
    Select,
    String,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal,
    null,
    select,
    union_all,
)
from sqlalchemy.orm import Session, aliased

from rhyme_openrlhf.api.store.lookup import NotFoundError
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Interval, Step

# Most lanes that a page can draw and a person can read at once.
MAX_LANES = 256

_WINDOW: tuple[tuple[str, Any], ...] = (("uid", String()), ("from_step", Integer()), ("to_step", Integer()))
# Parts of the result: the run with its number of engines; lanes; intervals.
_RUN, _LANE, _INTERVAL = range(3)


class LaneInterval(NamedTuple):
    """A segment of a lane; start and end in unix seconds."""

    engine: int
    start: float
    end: float
    step: int
    state: str
    cause: str
    weight_version: int | None


@dataclass(frozen=True)
class Lane:
    """One engine in the window: its intervals by time, and its seconds with nothing to run."""

    engine: int
    bubble_seconds: float
    intervals: list[LaneInterval]


@dataclass(frozen=True)
class Timeline:
    """A window of the timeline. `engines`: number of engines with intervals; `truncated`: intervals were left out."""

    lanes: list[Lane]
    engines: int
    truncated: bool


def timeline(
    session: Session,
    uid: str,
    from_step: int,
    to_step: int,
    chosen: Sequence[int] | None,
    worst: int,
    limit: int,
) -> Timeline:
    """Return lanes of the `chosen` engines, else of the `worst` ones (most bubble time), with at most `limit`
    intervals.

    `uid`: the run's. Raises NotFoundError.
    """
    found: dict[int, list[Any]] = {_RUN: [], _LANE: [], _INTERVAL: []}
    window: dict[str, Any] = {"uid": uid, "from_step": from_step, "to_step": to_step}
    if chosen is not None:
        window["engines"] = list(chosen)
    for part, *row in session.execute(_statement(chosen is not None), {**window, "worst": worst, "limit": limit + 1}):
        found[part].append(row)
    if not found[_RUN]:
        raise NotFoundError("run", uid)
    ranked = [(engine, seconds) for engine, seconds, *_ in found[_LANE]]
    ranked.sort(key=lambda lane: lane[0] if chosen is not None else (-lane[1], lane[0]))
    lanes = {engine: Lane(engine, seconds, []) for engine, seconds in ranked}
    # The position among the intervals is the last column, because a UNION keeps no order.
    rows = sorted(found[_INTERVAL], key=lambda row: row[-1])
    for *values, _ in rows[:limit]:
        lanes[values[0]].intervals.append(LaneInterval(*values))
    return Timeline(list(lanes.values()), found[_RUN][0][0], len(rows) > limit)


@functools.cache
def _statement(chosen: bool) -> Select[Any] | Any:
    """Return the statement for chosen engines or the worst; cached, because making it takes as long as its answer."""
    uid, from_step, to_step = (bindparam(name, type_=kind) for name, kind in _WINDOW)
    of_run = select(Run.id).where(Run.uid == uid).scalar_subquery()
    first = _first_steps(of_run, from_step, to_step)
    # Nobody waits for a run that is not there yet: an attempt's start-up is no bubble, and a stop is a gap.
    started = case((first.c.started_at > Interval.start, first.c.started_at), else_=Interval.start)
    window = (
        Interval.run_id == of_run, Interval.step >= from_step, Interval.step <= to_step, Interval.end > started,
    )  # fmt: skip
    length = cast(Interval.end - started, Float)
    bubble = func.coalesce(func.sum(length).filter(Interval.state != "generate"), 0.0)
    # Every engine of the window: few rows, read once for their number and for the lanes.
    counted = select(Interval.engine, bubble.label("bubble")).outerjoin(first, first.c.step == Interval.step)
    every = counted.where(*window).group_by(Interval.engine).cte("every")
    lanes = select(every.c.engine, every.c.bubble).limit(bindparam("worst", type_=Integer()))
    if chosen:
        lanes = lanes.where(every.c.engine.in_(bindparam("engines", type_=Integer(), expanding=True))).order_by(
            every.c.engine
        )
    else:
        lanes = lanes.order_by(every.c.bubble.desc(), every.c.engine)
    ranked = lanes.cte("ranked")
    place = func.row_number().over(order_by=(Interval.start, Interval.id)).label("place")
    shown = (
        select(
            Interval.engine, started.label("start"), Interval.end, Interval.step, Interval.state, Interval.cause,
            Interval.weight_version, place,
        )
        .outerjoin(first, first.c.step == Interval.step)
        .where(*window, Interval.engine.in_(select(ranked.c.engine)))
        .order_by(Interval.start, Interval.id)
        .limit(bindparam("limit", type_=Integer()))
        .subquery()
    )  # fmt: skip
    engines = select(func.count()).select_from(every).scalar_subquery()
    return union_all(
        _part(_RUN, engines).where(Run.uid == uid).select_from(Run),
        _part(_LANE, ranked.c.engine, ranked.c.bubble),
        _part(_INTERVAL, *shown.columns),
    )


def _first_steps(of_run: ScalarSelect[int], from_step: BindParameter[int], to_step: BindParameter[int]) -> CTE:
    """Return the steps of the window that are the first of their attempts, and when their rollouts began."""
    before = aliased(Step)
    same_attempt = (before.run_id == Step.run_id, before.step == Step.step - 1, before.attempt_id == Step.attempt_id)
    return (
        select(Step.step, Step.started_at)
        .outerjoin(before, and_(*same_attempt))
        .where(Step.run_id == of_run, Step.step >= from_step, Step.step <= to_step)
        .where(before.step.is_(None))
        .cte("first")
    )


def _part(number: int, *columns: Any) -> Select[Any]:
    """Return one part of the result, as wide as an interval, with declared types because PostgreSQL makes NULL text."""
    types = (Integer, Float, Float, Integer, String, String, Integer, Integer)
    cells: list[ColumnElement[Any]] = [cast(one, kind) for one, kind in zip(columns, types, strict=False)]
    cells += [cast(null(), kind) for kind in types[len(columns) :]]
    return select(literal(number), *(cell.label(f"c{i}") for i, cell in enumerate(cells)))
