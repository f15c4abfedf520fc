"""Curves of a run: columns of `steps`, figures computed from them, and metrics. They are down-sampled here.

A curve's x is the step, or the run's progress at the end of the step. Progress is counted in seconds since the first
step began, or in response tokens or samples of all steps so far. Steps whose x is not known are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curve_points import read_points
from rhyme_openrlhf.api.read.downsampling import downsample
from rhyme_openrlhf.api.read.smoothing import smoothed
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.curve_blocks import NO_POINTS, Points, metric_names
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.step_figures import COLUMNS, FIGURES
from rhyme_openrlhf.telemetry import metrics

Axis = Literal["step", "time", "tokens", "samples"]
# The column of a step that each axis adds up; time is not added up.
_ADDED_UP: dict[Axis, str] = {"tokens": "response_tokens", "samples": "samples"}
# Figures computed here from curves of columns, because no blocks hold their values.
RATIOS = {name: figure for name, figure in metrics.FIGURES.items() if name not in FIGURES}
# A chart's width in pixels, and more than any chart has.
POINTS = 500
MOST_POINTS = 5000


@dataclass(frozen=True)
class Curve:
    """A curve. `x`: its axis. `count`: points before down-sampling. `smooth`: its moving average, if one was asked."""

    name: str
    x: list[float]
    values: list[float | None]
    count: int
    smooth: Curve | None = None


def curve_names(session: Session, run: Run) -> dict[str, list[str]]:
    """Return the names of the run's curves: columns, figures and metrics."""
    names = metric_names(session.connection(), run.id)
    return {"columns": list(COLUMNS), "figures": [*FIGURES, *RATIOS], "metrics": names}


def curves(
    session: Session, uid: str, names: Sequence[str], from_step: int, to_step: int, points: int, axis: Axis = "step",
    smooth: float = 0.0,
) -> list[Curve]:  # fmt: skip
    """Return one curve per name, in this order; an unknown name gives an empty curve. `uid`: the run's.

    `smooth`: the weight of a moving average over all steps that are read (smoothing.py); 0: none. Columns and figures
    take precedence over metrics of the same name. Raises NotFoundError.
    """
    ends = ["finished_at"] if axis == "time" else []
    stored = [part for name in names for part in (RATIOS[name].columns if name in RATIOS else (name,))]
    found = read_points(session, uid, [*stored, *ends], from_step, to_step)
    found |= {name: _figure(RATIOS[name], found) for name in names if name in RATIOS}
    places = None
    if axis == "time":
        places = _since_the_start(session, uid, found["finished_at"])
    elif axis != "step":
        column = _ADDED_UP[axis]
        places = _added_up(read_points(session, uid, [column], 0, to_step)[column])
    shown = []
    for name in names:
        x, values = found[name].steps.astype(np.float64), found[name].values
        if places is not None:
            x, values = _placed(found[name], places)
        average = None
        if smooth:
            average = Curve(name, *downsample(x, smoothed(values, smooth), points), count=len(x))
        shown.append(Curve(name, *downsample(x, values, points), count=len(x), smooth=average))
    return shown


def _figure(figure: metrics.Figure, of: Mapping[str, Points]) -> Points:
    """Return a figure at the steps that all its columns have; without a value where the denominator is 0."""
    steps = functools.reduce(np.intersect1d, (of[name].steps for name in figure.columns))
    above, by = figure.parts(lambda name: of[name].values[np.searchsorted(of[name].steps, steps)])
    return Points(steps, above / np.where(by == 0, np.nan, by))


def _since_the_start(session: Session, uid: str, ends: Points) -> Points:
    """Return the seconds from the start of the run's first step to the end of each step."""
    begins = read_points(session, uid, ["started_at"], 0, INT32)["started_at"].values
    known = begins[~np.isnan(begins)]
    return Points(ends.steps, ends.values - known.min()) if len(known) else NO_POINTS


def _added_up(amounts: Points) -> Points:
    """Return the sum of all amounts up to each step; a step without one is not known, and adds nothing."""
    sums = np.cumsum(np.nan_to_num(amounts.values))
    return Points(amounts.steps, np.where(np.isnan(amounts.values), np.nan, sums))


def _placed(points: Points, places: Points) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points' values with the places of their steps as x, without points whose place is not known."""
    if not len(places.steps):
        return NO_POINTS.values, NO_POINTS.values
    at = np.minimum(np.searchsorted(places.steps, points.steps), len(places.steps) - 1)
    x = np.where(places.steps[at] == points.steps, places.values[at], np.nan)
    known = ~np.isnan(x)
    return x[known], points.values[known]
