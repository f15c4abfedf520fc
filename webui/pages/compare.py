"""The page `/compare?run=a&run=b`: how do runs differ in settings and results?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.comparison import (
    MAX_COMPARED,
    WARM_UP,
    RunFigures,
    common_steps,
    differ,
    differing,
    everything_of,
    figures_of,
    ratio,
)
from rhyme_openrlhf.api.read.runs import RunFilter, list_runs
from rhyme_openrlhf.api.store.bounds import UidText
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import METRIC_LENGTH, Metric
from rhyme_openrlhf.api.store.status import ACTIVE
from rhyme_openrlhf.settings.recorded import is_own
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.several_runs import RUNS_FIGURES, run_names
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.tabs import CurveViewDep
from rhyme_openrlhf.webui.run.recorded_settings import rows_of
from rhyme_openrlhf.webui.site import text

router = APIRouter(include_in_schema=False)

# Number of recent runs on offer; the table of runs has the older ones.
OFFERED = 30
METRICS = 8


@dataclass(frozen=True)
class Measure:
    """One row of the summary. `more_is_better` is None if neither direction is better."""

    name: str
    title: str
    hint: str
    kind: str
    more_is_better: bool | None


MEASURES: tuple[Measure, ...] = (
    Measure("reward", "Reward", "Mean reward of a step", "number", True),
    Measure("tokens_per_second", "Tokens/s", "Response tokens per second of rollout", "number", True),
    Measure("rollout_seconds", "Rollout time", "Of one step", "duration", False),
    Measure("seconds_per_step", "Step time", "From a step's rollout to the end of its training", "duration", False),
    Measure("speculation_rate", "Speculation", "Share of response tokens that were accepted drafts", "share", True),
    Measure(
        "bubble_fraction",
        "Bubbles",
        "Share of engine time in rollouts with nothing to run; training is not counted",
        "share",
        False,
    ),
    Measure("step", "Steps", "Steps trained", "count", None),
)
_WRITTEN: dict[str, Callable[[float | None], str]] = {
    "number": text.number,
    "duration": text.duration,
    "share": text.percent,
    "count": text.number,
}


@dataclass(frozen=True)
class Cell:
    """A value of one run. `trend`: "better" or "worse" than the first run, or ""."""

    value: str
    ratio: str
    trend: str


@router.get("/compare")
def compare_page(
    page: PageDep,
    view: CurveViewDep,
    run: Annotated[list[UidText], Query(max_length=MAX_COMPARED + 1)] = [],  # noqa: B006 (FastAPI copies it)
    metric: Annotated[list[Annotated[str, Query(max_length=METRIC_LENGTH)]], Query(max_length=METRICS + 1)] = [],  # noqa: B006
) -> HTMLResponse:
    """Render runs side by side; the address holds all choices."""
    uids = list(dict.fromkeys(run))
    dropped = uids[MAX_COMPARED:]
    uids = uids[:MAX_COMPARED]
    metrics = [name for name in dict.fromkeys(metric) if name][:METRICS]
    with page.service.database.reading() as session:
        rows = [find_run(session, uid) for uid in uids]
        offered = [
            one
            for one in list_runs(session, RunFilter(), "created_at", "desc", OFFERED, None)[0]
            if one.uid not in uids
        ]
        context = _compared(session, rows) if len(rows) > 1 else {"runs": []}
        single = rows[0].name if len(rows) == 1 else ""
        known = _metrics(session, rows)
    query = urlencode([*(("run", uid) for uid in uids), *view.chosen.items()])
    return page.render(
        "compare.html",
        uids=uids,
        single=single,
        offered=offered,
        view=view,
        switches=view.switches(page),
        query=f"?{query}",
        metrics=metrics,
        known_metrics=[name for name in known if name not in metrics],
        figures=[figure for figure in RUNS_FIGURES.values() if figure.curves],
        most=MAX_COMPARED,
        dropped=len(dropped),
        **context,
    )


def _compared(session: Session, rows: list[Run]) -> dict[str, Any]:
    steps = common_steps(rows)
    figures = [figures_of(session, row, steps) for row in rows]
    recorded = [everything_of(row) for row in rows]
    names = differing(recorded)
    shared = len(set().union(*recorded)) - len(names)
    runs = [
        {
            "run": row,
            "name": name,
            "color": palette.series_color(index),
            "dash": palette.svg_dash(index),
            "cells": [_cell(measure, values, figures[0], index) for measure in MEASURES],
        }
        for index, (row, name, values) in enumerate(zip(rows, run_names(rows), figures, strict=True))
    ]
    return {
        "runs": runs,
        "measures": MEASURES,
        "steps": steps,
        "warm_up": WARM_UP if steps.first > 1 else 0,
        "differences": rows_of([name for name in names if not is_own(name)], recorded),
        "own": rows_of([name for name in names if is_own(name)], recorded),
        "shared": shared,
        "is_live": any(row.status in ACTIVE for row in rows),
    }


def _cell(measure: Measure, figures: RunFigures, reference: RunFigures, index: int) -> Cell:
    value, first = figures.medians[measure.name], reference.medians[measure.name]
    written = _WRITTEN[measure.kind](value)
    times = ratio(value, first)
    # A ratio of values that may be negative means nothing.
    if index == 0 or times is None or times < 0 or (first or 0.0) < 0:
        return Cell(written, "", "")
    trend = ""
    if measure.more_is_better is not None and differ(figures.by_step[measure.name], reference.by_step[measure.name]):
        trend = "better" if (times > 1) == measure.more_is_better else "worse"
    return Cell(written, text.ratio(times), trend)


def _metrics(session: Session, rows: list[Run]) -> list[str]:
    """Return the names of the metrics that OpenRLHF reported for any of the runs."""
    ids = [row.id for row in rows]
    return list(session.scalars(select(Metric.name).where(Metric.run_id.in_(ids)).distinct().order_by(Metric.name)))
