"""The curves of a run: any column of `steps`, any figure made of them, any metric; down-sampled here, not in the page.

Figures are computed by the database with the definitions of `telemetry/metrics.py` (a test compares them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from typing import cast as cast_to

from sqlalchemy import ColumnElement, Float, Select, case, cast, func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.models import Run
from rhyme_openrlhf.api.record import Metric, Step
from rhyme_openrlhf.api.series import downsample
from rhyme_openrlhf.telemetry.metrics import MS_PER_SECOND

Axis = Literal["step", "time"]
_NO_CURVES = {"run_id", "step", "attempt_id"}
COLUMNS: tuple[str, ...] = tuple(column.name for column in Step.__table__.columns if column.name not in _NO_CURVES)
BUBBLES: tuple[str, ...] = tuple(name for name in COLUMNS if name.startswith("bubble_"))


def _ratio(numerator: Any, denominator: Any) -> ColumnElement[Any]:
    return cast(numerator, Float) / func.nullif(cast(denominator, Float), 0.0)


def _bubble_seconds() -> ColumnElement[Any]:
    total: Any = getattr(Step, BUBBLES[0])
    for name in BUBBLES[1:]:
        total = total + getattr(Step, name)
    return total


FIGURES: dict[str, ColumnElement[Any]] = {
    "speculation_rate": _ratio(Step.accepted, Step.engine_tokens),
    "acceptance_rate": _ratio(Step.accepted, Step.drafted),
    "tokens_per_step": _ratio(Step.decode_tokens, Step.sample_steps),
    "decode_step_ms": _ratio(Step.busy_seconds * MS_PER_SECOND, Step.decode_steps),
    "tokens_per_second": _ratio(Step.response_tokens, Step.rollout_seconds),
    # None where there is no timeline to find bubbles in.
    "bubble_fraction": _ratio(_bubble_seconds(), case((Step.intervals > 0, Step.engines * Step.rollout_seconds))),
    "drafted_per_draft": _ratio(Step.drafted, Step.drafts),
    "drafting_share": _ratio(Step.draft_seconds, Step.busy_seconds),
    "truncated_share": _ratio(Step.truncated, Step.samples),
    "step_seconds": Step.finished_at - Step.started_at,
}


@dataclass(frozen=True)
class Curve:
    """`x`: steps, or seconds since the run's first step began. `count`: points before down-sampling."""

    name: str
    x: list[float]
    values: list[float | None]
    count: int


def curve_names(session: Session, run: Run) -> dict[str, list[str]]:
    """What there is to draw: columns, figures, and this run's metrics."""
    metrics = session.scalars(select(Metric.name).where(Metric.run_id == run.id).distinct().order_by(Metric.name))
    return {"columns": list(COLUMNS), "figures": list(FIGURES), "metrics": list(metrics)}


def curves(
    session: Session, run: Run, names: Sequence[str], from_step: int, to_step: int, points: int, axis: Axis = "step"
) -> list[Curve]:
    """One curve a name, in this order; a name nothing is known of gives an empty one.

    Columns and figures come before metrics of the same name.
    """
    of_steps = [name for name in names if name in COLUMNS or name in FIGURES]
    found: dict[str, tuple[Sequence[float], Sequence[float | None]]] = {}
    window = (Step.run_id == run.id, Step.step >= from_step, Step.step <= to_step)
    if of_steps:
        chosen = [FIGURES[name] if name in FIGURES else getattr(Step, name) for name in of_steps]
        place = Step.step if axis == "step" else Step.finished_at
        at, *columns = _columns(session, select(place, *chosen).where(*window).order_by(Step.step))
        found = {name: _placed(at, values, session, run, axis) for name, values in zip(of_steps, columns, strict=True)}
    for name in names:
        if name not in found:
            found[name] = _metric(session, run, name, from_step, to_step, axis)
    return [Curve(name, *downsample(*found[name], points), count=len(found[name][0])) for name in names]


def _metric(
    session: Session, run: Run, name: str, from_step: int, to_step: int, axis: Axis
) -> tuple[Sequence[float], Sequence[float | None]]:
    query = select(Metric.step if axis == "step" else Step.finished_at, Metric.value)
    if axis == "time":
        query = query.outerjoin(Step, (Step.run_id == Metric.run_id) & (Step.step == Metric.step))
    window = (Metric.run_id == run.id, Metric.name == name, Metric.step >= from_step, Metric.step <= to_step)
    at, values = _columns(session, query.where(*window).order_by(Metric.step))
    return _placed(at, values, session, run, axis)


def _columns(session: Session, query: Select[*tuple[Any, ...]]) -> list[Sequence[Any]]:
    """The query's columns, of numbers: as the driver gives them, because rows of objects take six times as long."""
    result = session.connection().execute(query)
    rows = result.cursor.fetchall() if result.cursor is not None else []
    return list(zip(*rows, strict=True)) if rows else [()] * len(query.selected_columns)


def _placed(
    at: Sequence[float | None], values: Sequence[float | None], session: Session, run: Run, axis: Axis
) -> tuple[Sequence[float], Sequence[float | None]]:
    """Points on the x axis, from their steps or from when these ended; None: that is not known yet."""
    if axis == "step":
        return cast_to(Sequence[float], at), values
    begin = session.scalar(select(func.min(Step.started_at)).where(Step.run_id == run.id))
    if begin is None:
        return [], []
    placed = [(moment - begin, value) for moment, value in zip(at, values, strict=True) if moment is not None]
    return [moment for moment, _ in placed], [value for _, value in placed]
