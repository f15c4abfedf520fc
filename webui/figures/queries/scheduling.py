"""Queries of the scheduling figures."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.latest_events import latest
from rhyme_openrlhf.api.read.step_buckets import bucket_width
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineSampleRow, Move, RankStabilityRow, Switch
from rhyme_openrlhf.telemetry.events import RankGroups
from rhyme_openrlhf.webui.figures.drawing import ranks
from rhyme_openrlhf.webui.figures.drawing import scheduling as drawing
from rhyme_openrlhf.webui.figures.drawing.ranks import RankShares
from rhyme_openrlhf.webui.figures.drawing.scheduling import MoveBucket, Reallocation
from rhyme_openrlhf.webui.figures.queries.timeline import MOST_BARS
from rhyme_openrlhf.webui.figures.run_figure import RunFigure, Window

# Most steps whose groups are shown: one point per group and step.
MOST_GROUPS = 500
MOST_SWITCHES = 2000
# Most bars that can still be told apart.
MOST_EPOCHS = 200
# Samples of 256 engines over a minute and a half: one step.
MOST_LOOKS = 25_000
REALLOCATION = "reallocation"


@dataclass(frozen=True)
class MoveKind:
    """Moves of one cause, carrier and outcome: their number and mean cost.

    `mean_downtime`: mean time in which no engine generated the sample; `mean_predicted`: the predicted downtime.
    """

    cause: str
    carrier: str
    outcome: str
    count: int
    mean_seconds: float | None
    mean_downtime: float | None
    mean_predicted: float | None
    mean_tokens: float | None


def move_kinds(session: Session, run: Run) -> list[MoveKind]:
    """Return all moves of a run, grouped; the most frequent group first."""
    kind = (Move.cause, Move.carrier, Move.outcome)
    count = func.count()
    rows = session.execute(
        select(*kind, count, *map(func.avg, (Move.seconds, Move.downtime_seconds, Move.predicted_seconds, Move.tokens)))
        .where(Move.run_id == run.id)
        .group_by(*kind)
        .order_by(count.desc(), *kind)
    ).all()
    # PostgreSQL returns the mean of integers as a Decimal.
    return [
        MoveKind(
            cause, carrier, outcome, moves, seconds, downtime, predicted, None if tokens is None else float(tokens)
        )
        for cause, carrier, outcome, moves, seconds, downtime, predicted, tokens in rows
    ]


def _stability(session: Session, run: Run, window: Window) -> list[RankStabilityRow]:
    query = select(RankStabilityRow).where(RankStabilityRow.run_id == run.id).order_by(RankStabilityRow.epoch.desc())
    return list(reversed(session.scalars(query.limit(window.points)).all()))


def _shares(session: Session, run: Run, window: Window) -> list[RankShares]:
    found = latest(session, run, "rank_stability", RankShares, MOST_EPOCHS, by=("epoch",)).bodies
    return sorted(found, key=lambda one: one.epoch)


def _groups(session: Session, run: Run, window: Window) -> list[RankGroups]:
    return latest(session, run, "rank_groups", RankGroups, MOST_GROUPS, by=("step",)).bodies


def _moves(session: Session, run: Run, window: Window) -> list[MoveBucket]:
    shown = (Move.run_id == run.id, Move.step >= window.from_step, Move.step <= window.to_step)
    first, last = session.execute(select(func.min(Move.step), func.max(Move.step)).where(*shown)).one()
    if first is None:
        return []
    width = bucket_width(first, last, MOST_BARS)
    bucket = (Move.step - first) // width
    rows = session.execute(
        select(bucket, Move.cause, func.count()).where(*shown).group_by(bucket, Move.cause).order_by(bucket)
    ).all()
    return [MoveBucket(first + at * width, first + (at + 1) * width - 1, cause, count) for at, cause, count in rows]


def _switches(session: Session, run: Run, window: Window) -> list[Switch]:
    query = select(Switch).where(Switch.run_id == run.id).order_by(Switch.time.desc()).limit(MOST_SWITCHES)
    return list(reversed(session.scalars(query).all()))


def _reallocation(session: Session, run: Run, window: Window) -> Reallocation | None:
    """Return the newest step that has reallocations, with the engines' running samples before and after."""
    where = (Move.run_id == run.id, Move.cause == REALLOCATION)
    step = session.scalar(select(func.max(Move.step)).where(*where))
    if step is None:
        return None
    begin, end = session.execute(
        select(func.min(Move.time), func.max(Move.time)).where(*where, Move.step == step)
    ).one()
    table = EngineSampleRow
    rows = session.execute(
        select(table.engine, table.time, table.running)
        .where(table.run_id == run.id, table.step == step)
        .order_by(table.time)
        .limit(MOST_LOOKS)
    ).all()
    before = {engine: running for engine, at, running in rows if at <= begin}
    after = {engine: running for engine, at, running in reversed(rows) if at >= end}
    return Reallocation(step, before, after)


FIGURES: tuple[RunFigure, ...] = (
    RunFigure("rank_stability", "Rank stability", _stability, ranks.stability),
    RunFigure("rank_shares", "Outcomes of predicted groups", _shares, ranks.rank_shares),
    RunFigure("predicted_length", "Predicted and real length", _groups, drawing.predicted_length),
    RunFigure("prediction_error", "Error of predicted lengths", _groups, drawing.prediction_error),
    RunFigure("rank_groups", "Engines of each rank group", _groups, drawing.group_engines),
    RunFigure("moves", "Moves by cause", _moves, drawing.moves),
    RunFigure("switches", "Layout switches", _switches, drawing.switches),
    RunFigure("reallocation", "Reallocation, before and after", _reallocation, drawing.reallocation),
)
