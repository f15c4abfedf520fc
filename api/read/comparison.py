"""Comparison of runs: figures, ratios to the first run, and differences between their records. Only reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.parameters import settings_of
from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.api.store.step_figures import FIGURES
from rhyme_openrlhf.settings.recorded import flatten

# Figures whose ratio to the first run tells how much faster or better a run is.
COMPARED = ("tokens_per_second", "speculation_rate", "bubble_fraction", "reward", "step", "seconds_per_step")

# Most runs that can be told apart in one chart.
MAX_COMPARED = 8

# Parts of a record besides its settings.
MACHINE, VERSIONS, GIT = "machine", "versions", "git"


def figures_of(session: Session, run: Run) -> dict[str, float | None]:
    """Return the figures `COMPARED` of one run."""
    figures: dict[str, float | None] = {name: getattr(run, name, None) for name in COMPARED}
    # Only complete steps count: a run that waits, or was stopped for a night, is not slower for that.
    seconds = FIGURES["step_seconds"]
    figures["seconds_per_step"] = session.scalar(select(func.avg(seconds)).where(Step.run_id == run.id))
    return figures


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
