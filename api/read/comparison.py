"""Runs side by side: their figures, ratios to the first, and how their configurations differ. Only reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.runs import flatten
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Step
from rhyme_openrlhf.api.store.step_figures import FIGURES

# Figures whose ratio to the first run's says how much faster or better a run is.
COMPARED = ("tokens_per_second", "speculation_rate", "bubble_fraction", "reward", "step", "seconds_per_step")

# Runs that can be told apart in one chart.
MAX_COMPARED = 8


def figures_of(session: Session, run: Run) -> dict[str, float | None]:
    """`COMPARED` of one run."""
    figures: dict[str, float | None] = {name: getattr(run, name, None) for name in COMPARED}
    # Of the steps that are whole: a run that waits, or was stopped for a night, is not slower for it.
    seconds = FIGURES["step_seconds"]
    figures["seconds_per_step"] = session.scalar(select(func.avg(seconds)).where(Step.run_id == run.id))
    return figures


def ratio(value: float | None, first: float | None) -> float | None:
    """`value` as a multiple of `first`; None where either is missing, or the first is zero."""
    return value / first if value is not None and first else None


def configuration(run: Run) -> dict[str, Any]:
    """Configuration and versions by dotted name, as the run recorded them."""
    return flatten({"config": run.config, "versions": run.versions})


def differing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names whose values not all `rows` share, or that one of them lacks; sorted."""
    names = sorted(set().union(*rows))
    return [name for name in names if any(name not in row or row[name] != rows[0].get(name) for row in rows)]
