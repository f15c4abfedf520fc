"""Curves of a run: columns of `steps`, figures computed from them, and metrics. They are down-sampled here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curve_points import read_points
from rhyme_openrlhf.api.read.downsampling import downsample
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.curve_blocks import NO_POINTS, Points, metric_names
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.step_figures import COLUMNS, FIGURES

Axis = Literal["step", "time"]
# A chart's width in pixels, and more than any chart has.
POINTS = 500
MOST_POINTS = 5000


@dataclass(frozen=True)
class Curve:
    """A curve. `x`: steps, or seconds since the run's first step began. `count`: points before down-sampling."""

    name: str
    x: list[float]
    values: list[float | None]
    count: int


def curve_names(session: Session, run: Run) -> dict[str, list[str]]:
    """Return the names of the run's curves: columns, figures and metrics."""
    metrics = metric_names(session.connection(), run.id)
    return {"columns": list(COLUMNS), "figures": list(FIGURES), "metrics": metrics}


def curves(
    session: Session, uid: str, names: Sequence[str], from_step: int, to_step: int, points: int, axis: Axis = "step"
) -> list[Curve]:
    """Return one curve per name, in this order; an unknown name gives an empty curve. `uid`: the run's.

    Columns and figures take precedence over metrics of the same name. Raises NotFoundError.
    """
    ends = ["finished_at"] if axis == "time" else []
    found = read_points(session, uid, [*names, *ends], from_step, to_step)
    begin = _begin(session, uid) if axis == "time" else None
    shown = []
    for name in names:
        x = found[name].steps.astype(np.float64)
        values = found[name].values
        if axis == "time":
            x, values = _timed(found[name], found["finished_at"], begin)
        shown.append(Curve(name, *downsample(x, values, points), count=len(x)))
    return shown


def _begin(session: Session, uid: str) -> float | None:
    """Return the start of the run's first step in unix seconds."""
    begins = read_points(session, uid, ["started_at"], 0, INT32)["started_at"].values
    known = begins[~np.isnan(begins)]
    return float(known.min()) if len(known) else None


def _timed(points: Points, ends: Points, begin: float | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points' values with their x as seconds from `begin` to the end of their step.

    Points whose step has no known end are left out.
    """
    if begin is None or not len(ends.steps):
        return NO_POINTS.values, NO_POINTS.values
    at = np.minimum(np.searchsorted(ends.steps, points.steps), len(ends.steps) - 1)
    moments = np.where(ends.steps[at] == points.steps, ends.values[at], np.nan)
    known = ~np.isnan(moments)
    return moments[known] - begin, points.values[known]
