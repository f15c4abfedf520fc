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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import Field
from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session, defer

from rhyme_openrlhf.api.read.comparison import differing
from rhyme_openrlhf.api.read.curve_points import read_points
from rhyme_openrlhf.api.read.downsampling import keep
from rhyme_openrlhf.api.store.bounds import INT32, View
from rhyme_openrlhf.api.store.curve_blocks import Points
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.settings.recorded import is_own, recorded_settings
from rhyme_openrlhf.settings.redaction import redact_config

SEED = "train.seed"
# As many as a sweep may have.
MOST_RUNS = 500
# Most values of all curves of an experiment: about 4 MB of JSON.
MOST_VALUES = 200_000
# Groupings kept; the settings of their runs, with which a new grouping is compared, have about 13 KB a run.
KEPT = 8
# Curves whose best value is the lowest one; of all others it is the highest.
_LOWEST_IS_BEST = re.compile(r"loss|seconds|_ms$|bubble|truncated|drafting_share|(^|[_/])kl($|[_/])")


@dataclass(frozen=True)
class Part:
    """The places of runs with equal settings, the oldest first, and their seeds. `options`: where parts differ."""

    options: dict[str, Any]
    members: list[int]
    seeds: list[Any]


@dataclass(frozen=True)
class Group:
    """Runs with equal settings but for the seed, the oldest first. `options`: the settings in which groups differ."""

    options: dict[str, Any]
    runs: list[Run]
    seeds: list[Any]


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


def groups_of(session: Session, experiment_id: int) -> tuple[list[Group], bool]:
    """Return the groups of an experiment's newest runs, at most `MOST_RUNS`; and whether there are more runs.

    Groups are in the order of their first runs. A grouping is kept until a setting of these runs changes, because the
    figures of a page each need it.
    """
    query = select(Run, cast(Run.config, Text), cast(Run.spec, Text))
    query = query.where(Run.experiment_id == experiment_id, Run.archived_at.is_(None))
    large = (Run.config, Run.spec, Run.command, Run.versions, Run.notes)
    query = query.options(*(defer(column) for column in large)).order_by(Run.id.desc()).limit(MOST_RUNS + 1)
    rows = session.execute(query).all()
    newest = rows[MOST_RUNS - 1 :: -1]
    parts = _grouping(tuple((config, spec) for _, config, spec in newest))
    groups = [Group(part.options, [newest[at][0] for at in part.members], part.seeds) for part in parts]
    return groups, len(rows) > MOST_RUNS


@lru_cache(maxsize=KEPT)
def _grouping(records: tuple[tuple[str, str | None], ...]) -> list[Part]:
    """Return the parts of records with their specifications, both as JSON."""
    return grouped([(redact_config(json.loads(config)), json.loads(spec or "null")) for config, spec in records])


def grouped(records: Iterable[tuple[Mapping[str, Any], Mapping[str, Any] | None]]) -> list[Part]:
    """Return parts of runs with equal settings, from the record and the specification of each run."""
    members: dict[tuple[bool, str], list[int]] = {}
    settings: dict[tuple[bool, str], dict[str, Any]] = {}
    seeds = []
    for at, (config, spec) in enumerate(records):
        found = recorded_settings(config, spec)
        seeds.append(found.get(SEED))
        own = found if spec is None else recorded_settings({}, spec)
        own = {name: value for name, value in own.items() if name != SEED and not is_own(name)}
        key = spec is not None, json.dumps(own, sort_keys=True)
        members.setdefault(key, []).append(at)
        settings[key] = own
    # Of each kind alone: what a specification leaves out is no difference to a record.
    kinds = ([one for key, one in settings.items() if key[0] is has_spec] for has_spec in (True, False))
    names = sorted({name for rows in kinds if rows for name in differing(rows)})
    return [
        Part({name: settings[key][name] for name in names if name in settings[key]}, of, [seeds[at] for at in of])
        for key, of in members.items()
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


def _known(points: Points) -> Points:
    known = ~np.isnan(points.values)
    return Points(points.steps[known], points.values[known])
