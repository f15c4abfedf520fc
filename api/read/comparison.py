"""Comparison of runs: figures, ratios to the first run, and differences between their records. Only reads.

Invariant: all figures are medians over the same steps of every run: those that all of them have trained, without the
first ones, in which engines and kernels warm up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curve_points import known_values, read_points
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.parameters import settings_of
from rhyme_openrlhf.settings.recorded import flatten
from rhyme_openrlhf.telemetry.metrics import ERRORS, WARM_UP

# Figures whose ratio to the first run tells how much faster or better a run is, and the curve of each.
CURVES = {
    "reward": "reward", "tokens_per_second": "tokens_per_second", "rollout_seconds": "rollout_seconds",
    "seconds_per_step": "step_seconds", "speculation_rate": "speculation_rate", "bubble_fraction": "bubble_fraction",
}  # fmt: skip
COMPARED = (*CURVES, "step")
# Most runs that can be told apart in one chart.
MAX_COMPARED = 8

# Parts of a record besides its settings.
MACHINE, VERSIONS, GIT = "machine", "versions", "git"


@dataclass(frozen=True)
class StepSpan:
    """The steps from `first` to `last`, both included; empty where `last` is below `first`."""

    first: int
    last: int


@dataclass(frozen=True)
class RunFigures:
    """The figures `COMPARED` of one run, and the values of each by step."""

    medians: Mapping[str, float | None]
    by_step: Mapping[str, Mapping[int, float]]


def common_steps(runs: Sequence[Run]) -> StepSpan:
    """Return the steps that all runs have trained; without the first ones where there are as many others."""
    last = min((run.step for run in runs if run.step), default=0)
    return StepSpan(WARM_UP + 1 if last >= 2 * WARM_UP else 1, last)


def figures_of(session: Session, run: Run, steps: StepSpan) -> RunFigures:
    """Return the figures of one run over these steps."""
    # A step's reward is known from its rollout, or later from the trainer.
    names = (*CURVES.values(), "rollout_reward")
    points = read_points(session, run.uid, names, steps.first, steps.last)
    known = {name: known_values(one) for name, one in points.items()}
    known["reward"] |= known["rollout_reward"]
    by_step = {name: known[curve] for name, curve in CURVES.items()}
    medians = {name: statistics.median(values.values()) if values else None for name, values in by_step.items()}
    return RunFigures({**medians, "step": run.step}, by_step)


def differ(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Return whether the values of the same steps, of which it needs two, differ by more than their noise."""
    apart = [one[step] - other[step] for step in one.keys() & other.keys()]
    if len(apart) < 2:
        return False
    return abs(statistics.fmean(apart)) > ERRORS * statistics.stdev(apart) / math.sqrt(len(apart))


def ratio(value: float | None, first: float | None) -> float | None:
    """Return `value` as a multiple of `first`, None if either is missing or the first is zero."""
    return value / first if value is not None and first else None


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sorted names whose values differ between `rows` or are missing in one of them."""
    names = sorted(set().union(*rows))
    return [name for name in names if any(name not in row or row[name] != rows[0].get(name) for row in rows)]


def everything_of(run: Run) -> dict[str, Any]:
    """Return everything that a comparison shows: settings, machine, versions and commits."""
    found = settings_of(run)
    for name, part in ((MACHINE, run.config.get(MACHINE)), (VERSIONS, run.versions), (GIT, run.config.get(GIT))):
        if isinstance(part, Mapping) and part:
            found.update(flatten(part, name))
    return found
