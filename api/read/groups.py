"""Groups of an experiment: runs whose settings are equal but for the seed, with mean and spread over them. Only reads.

Invariants:

- Specifications are compared with specifications, and records with records. A record also has the defaults, so a run
  that the service started is grouped by its specification alone.
- The seed, and names and places of one run (`recorded.is_own`), tell no groups apart.
- Archived runs are in no group.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from rhyme_openrlhf.api.read.comparison import differing
from rhyme_openrlhf.api.read.curve_points import read_points
from rhyme_openrlhf.api.read.downsampling import keep
from rhyme_openrlhf.api.store.bounds import INT32, View
from rhyme_openrlhf.api.store.curve_blocks import Points
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.parameters import settings_of
from rhyme_openrlhf.settings.recorded import is_own, recorded_settings

SEED = "train.seed"
# As many as a sweep may have.
MOST_RUNS = 500
# Most values of all curves of an experiment: about 4 MB of JSON.
MOST_VALUES = 200_000
# Curves whose best value is the lowest one; of all others it is the highest.
_LOWEST_IS_BEST = re.compile(r"loss|seconds|_ms$|bubble|truncated|drafting_share|(^|[_/])kl($|[_/])")


@dataclass(frozen=True)
class Group:
    """Runs with equal settings but for the seed, the oldest first. `options`: the settings in which groups differ."""

    options: dict[str, Any]
    runs: list[Run]


class SpreadView(View):
    """Mean and standard deviation of a value over `runs` runs, those that have one."""

    runs: int
    mean: float | None
    deviation: float | None = Field(description="Null for fewer than two runs.")


class MeanCurveView(View):
    """The mean of the runs that have a value at step `x`, their number, and mean minus and plus standard deviation."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[int]


class GroupFigureView(View):
    """A curve of a group's runs."""

    name: str
    final: SpreadView = Field(description="Of the last values.")
    best: SpreadView = Field(description="Of the highest values; of the lowest for losses, times and bubbles.")
    curve: MeanCurveView | None = Field(description="Null unless `points` asks for it.")


def runs_of(session: Session, experiment_id: int) -> tuple[list[Run], bool]:
    """Return the newest runs of an experiment, at most `MOST_RUNS`, oldest first; and whether there are more."""
    query = select(Run).where(Run.experiment_id == experiment_id, Run.archived_at.is_(None))
    query = query.options(defer(Run.command), defer(Run.versions), defer(Run.notes))
    found = session.scalars(query.order_by(Run.id.desc()).limit(MOST_RUNS + 1)).all()
    return list(reversed(found[:MOST_RUNS])), len(found) > MOST_RUNS


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Return the groups of these runs, in the order of their first runs."""
    members: dict[tuple[bool, str], list[Run]] = {}
    settings: dict[tuple[bool, str], dict[str, Any]] = {}
    for run in runs:
        own = _settings(run)
        key = run.spec is not None, json.dumps(own, sort_keys=True)
        members.setdefault(key, []).append(run)
        settings[key] = own
    # Of each kind alone: what a specification leaves out is no difference to a record.
    kinds = ([one for key, one in settings.items() if key[0] is has_spec] for has_spec in (True, False))
    names = sorted({name for rows in kinds if rows for name in differing(rows)})
    return [
        Group({name: settings[key][name] for name in names if name in settings[key]}, runs)
        for key, runs in members.items()
    ]


def figures_of(session: Session, group: Group, names: Sequence[str], points: int) -> list[GroupFigureView]:
    """Return the curves of a group by name. `points`: most points of a mean curve; 0: none are made."""
    read = [read_points(session, run.uid, names, 0, INT32) for run in group.runs]
    found = []
    for name in names:
        curves = [known for one in read if len((known := _known(one[name])).steps)]
        best = min if _LOWEST_IS_BEST.search(name) else max
        found.append(
            GroupFigureView(
                name=name,
                final=spread([float(one.values[-1]) for one in curves]),
                best=spread([float(best(one.values)) for one in curves]),
                curve=mean_curve(curves, points) if points else None,
            )
        )
    return found


def spread(values: Sequence[float]) -> SpreadView:
    """Return mean and standard deviation of a sample."""
    mean = statistics.fmean(values) if values else None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return SpreadView(runs=len(values), mean=mean, deviation=deviation)


def mean_curve(curves: Sequence[Points], points: int) -> MeanCurveView:
    """Return the mean of curves whose values are all known, at most `points` points of it."""
    steps = np.unique(np.concatenate([one.steps for one in curves])) if curves else np.zeros(0, np.int64)
    count, mean, squares = np.zeros(len(steps), np.int64), np.zeros(len(steps)), np.zeros(len(steps))
    for one in curves:  # Welford's update, which keeps its digits where the spread is small
        at = np.searchsorted(steps, one.steps)
        count[at] += 1
        off = one.values - mean[at]
        mean[at] += off / count[at]
        squares[at] += off * (one.values - mean[at])
    deviation = np.sqrt(squares / np.maximum(count - 1, 1))
    kept = keep(mean, points)
    rows = ((mean - deviation)[kept], mean[kept], (mean + deviation)[kept])
    low, middle, high = (row.tolist() for row in rows)
    x, runs = steps[kept].astype(np.float64).tolist(), count[kept].tolist()
    return MeanCurveView(x=x, mean=middle, low=low, high=high, runs=runs)


def _settings(run: Run) -> dict[str, Any]:
    found = recorded_settings({}, run.spec) if run.spec is not None else settings_of(run)
    return {name: value for name, value in found.items() if name != SEED and not is_own(name)}


def _known(points: Points) -> Points:
    known = ~np.isnan(points.values)
    return Points(points.steps[known], points.values[known])
