"""Routes for curves of one or several runs, the difference of two configurations, and the bubble timeline."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import FromStep, RunUid, ToStep
from rhyme_openrlhf.api.http.problems import FieldError, ProblemError, documented
from rhyme_openrlhf.api.read.comparison import (
    COMPARED,
    MAX_COMPARED,
    common_steps,
    differing,
    everything_of,
    figures_of,
    ratio,
)
from rhyme_openrlhf.api.read.curves import MOST_POINTS, POINTS, Axis, Curve, curve_names, curves
from rhyme_openrlhf.api.read.run_json import RunSummary
from rhyme_openrlhf.api.read.runs import summary_of
from rhyme_openrlhf.api.read.smoothing import MOST_WEIGHT
from rhyme_openrlhf.api.read.timeline import MAX_LANES, timeline
from rhyme_openrlhf.api.store.bounds import INT32, UidText, View
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.record import METRIC_LENGTH

router = APIRouter(tags=["series"], responses=documented(401, 403, 404, 422, 429, 503))

# Most curves per request.
MAX_NAMES = 32
DEFAULT_NAMES = "reward,tokens_per_second"
# Default intervals per response: about 2 MB of JSON.
INTERVALS = 5000
MOST_INTERVALS = 20_000

Names = Annotated[
    str,
    Query(
        max_length=MAX_NAMES * METRIC_LENGTH,
        # At least one name, more than a comma.
        pattern=r"^[^\x00]*[^,\x00][^\x00]*$",
        description=f"1 to {MAX_NAMES} different names, separated by commas: columns of a step, figures, or metrics.",
        examples=["reward,tokens_per_second"],
    ),
]
Points = Annotated[int, Query(ge=4, le=MOST_POINTS, description="Most points of a curve.")]
Smooth = Annotated[
    float, Query(ge=0, le=MOST_WEIGHT, description="Weight of a moving average, which replaces the values; 0: none.")
]


class CurveNames(BaseModel):
    """Names of the run's curves."""

    columns: list[str]
    figures: list[str]
    metrics: list[str]


class CurveView(View):
    """One curve; a value is null if it was missing or not finite."""

    name: str
    x: list[float]
    values: list[float | None]
    count: int = Field(description="Points before down-sampling.")


class SeriesView(BaseModel):
    """Curves of one run."""

    run: str
    axis: Axis
    curves: list[CurveView]


class IntervalView(View):
    """A state of an engine from `start` to `end` (unix seconds)."""

    step: int
    state: str
    cause: str
    start: float
    end: float
    weight_version: int | None


class LaneView(View):
    """The lane of one engine."""

    engine: int
    bubble_seconds: float
    intervals: list[IntervalView]


class TimelineView(View):
    """A window of the bubble timeline."""

    lanes: list[LaneView]
    engines: int = Field(description="Engines with intervals in the window.")
    truncated: bool = Field(description="True if intervals were left out.")


class Compared(BaseModel):
    """One run of a comparison; ratios are relative to the first run, null if either has no value."""

    run: RunSummary
    figures: dict[str, float | None]
    ratios: dict[str, float | None]
    curves: list[CurveView]


class Comparison(BaseModel):
    """Several runs side by side. Figures are medians over the steps that all runs have, without the first two."""

    axis: Axis
    from_step: int = Field(description="First step of the figures.")
    to_step: int = Field(description="Last step of the figures; 0 where no run has any.")
    runs: list[Compared]


class Difference(BaseModel):
    """A setting that differs between two runs; `in_a` and `in_b`: whether a run has it at all."""

    name: str = Field(examples=["settings.histospec.window_max"])
    a: Any
    b: Any
    in_a: bool
    in_b: bool


class ConfigDiff(BaseModel):
    """Differences between the configurations of two runs."""

    a: str
    b: str
    differences: list[Difference]


@router.get("/runs/{uid}/series/names", summary="Names of curves")
def get_names(uid: RunUid, who: auth.Viewer, service: ServiceDep) -> CurveNames:
    """List the names that `series` accepts for this run."""
    with service.database.reading() as session:
        return CurveNames(**curve_names(session, find_run(session, uid)))


@router.get("/runs/{uid}/series", summary="Curves")
def get_series(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    names: Names,
    from_step: FromStep = 0,
    to_step: ToStep = INT32,
    points: Points = POINTS,
    axis: Axis = "step",
    smooth: Smooth = 0.0,
) -> SeriesView:
    """Return down-sampled curves that keep the extremes of every stretch; an unknown name gives an empty curve."""
    # No snapshot: one statement, or two with another axis than steps. Steps that the second lacks are left out.
    with service.database.reading(snapshot=False) as session:
        found = curves(session, uid, split_names(names), from_step, to_step, points, axis, smooth)
    return SeriesView(run=uid, axis=axis, curves=[_curve(curve) for curve in found])


@router.get("/runs/{uid}/timeline", summary="Bubble timeline")
def get_timeline(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    from_step: FromStep,
    to_step: ToStep,
    engine: Annotated[list[Annotated[int, Query(ge=0, le=INT32)]] | None, Query(max_length=MAX_LANES)] = None,
    worst: Annotated[int, Query(ge=1, le=MAX_LANES, description="Most lanes, most bubble time first.")] = 16,
    limit: Annotated[int, Query(ge=1, le=MOST_INTERVALS, description="Most intervals, earliest first.")] = INTERVALS,
) -> TimelineView:
    """Return the states of engines in a window of steps: those given by `engine`, else those with most bubble time."""
    lanes = len(engine) if engine else worst
    with service.database.reading(snapshot=False) as session:
        return TimelineView.model_validate(timeline(session, uid, from_step, to_step, engine, lanes, limit))


@router.get("/compare", summary="Compare runs")
def compare(
    who: auth.Viewer,
    service: ServiceDep,
    run: Annotated[list[UidText], Query(min_length=2, max_length=MAX_COMPARED, description="2 to 8 runs.")],
    names: Names = DEFAULT_NAMES,
    points: Points = POINTS,
    axis: Axis = "step",
    smooth: Smooth = 0.0,
) -> Comparison:
    """Compare runs: curves, figures, and their ratios to the first run's."""
    compared: list[Compared] = []
    with service.database.reading() as session:
        rows = [find_run(session, uid) for uid in run]
        steps = common_steps(rows)
        for row in rows:
            figures = figures_of(session, row, steps).medians
            first = compared[0].figures if compared else figures
            found = curves(session, row.uid, split_names(names), 0, INT32, points, axis, smooth)
            compared.append(
                Compared(
                    run=summary_of(session, row),
                    figures=dict(figures),
                    ratios={name: ratio(figures[name], first[name]) for name in COMPARED},
                    curves=[_curve(curve) for curve in found],
                )
            )
    return Comparison(axis=axis, from_step=steps.first, to_step=steps.last, runs=compared)


@router.get("/config-diff", summary="Configuration difference")
def config_diff(
    who: auth.Viewer, service: ServiceDep, a: Annotated[UidText, Query()], b: Annotated[UidText, Query()]
) -> ConfigDiff:
    """Return the recorded values that differ between two runs: settings (`group.name`), machine, versions, commits."""
    with service.database.reading() as session:
        flat = [everything_of(find_run(session, uid)) for uid in (a, b)]
    differences = [
        Difference(name=name, a=flat[0].get(name), b=flat[1].get(name), in_a=name in flat[0], in_b=name in flat[1])
        for name in differing(flat)
    ]
    return ConfigDiff(a=a, b=b, differences=differences)


def split_names(names: str) -> list[str]:
    """Return the different names of a request."""
    found = list(dict.fromkeys(name for name in names.split(",") if name))
    if len(found) > MAX_NAMES:
        problem = FieldError(field="query.names", message=f"must name at most {MAX_NAMES} curves")
        raise ProblemError(422, "the request is not valid", errors=[problem])
    return found


def _curve(curve: Curve) -> CurveView:
    return CurveView.model_validate(curve.smooth or curve)
