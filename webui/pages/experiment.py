"""The page `/experiments/<id>`: which settings are better, and is the difference more than that of seeds?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.http.fields import ExperimentId
from rhyme_openrlhf.api.read.comparison import MAX_COMPARED
from rhyme_openrlhf.api.read.groups import MOST_RUNS, Group, GroupFigureView, SpreadView, figures_of, groups_of
from rhyme_openrlhf.api.store.bounds import UidText
from rhyme_openrlhf.api.store.lookup import find_experiment
from rhyme_openrlhf.api.store.status import ACTIVE, PERHAPS_ACTIVE
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.experiment import EXPERIMENT_FIGURES, MOST_AXES, ONE_GROUP, option_value, options_of
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep
from rhyme_openrlhf.webui.site import text

router = APIRouter(include_in_schema=False)

# Figures in the table; the first one orders the groups.
MEASURED = ("reward", "throughput", "step-time", "speculation", "bubbles")
_CURVES = tuple(dict.fromkeys(name for figure in MEASURED for name in EXPERIMENT_FIGURES[figure].curves))
Drawn = Annotated[list[UidText], Query(max_length=MAX_COMPARED)]


@dataclass(frozen=True)
class Row:
    """A group as a row: its options and figures in words. `color`: "" if its curves are not drawn."""

    options: tuple[str, ...]
    runs: int
    statuses: str
    href: str
    figures: tuple[tuple[str, str], ...]
    color: str
    dash: str


@router.get("/experiments/{experiment_id}")
def experiment_page(page: PageDep, experiment_id: ExperimentId) -> HTMLResponse:
    """Render the groups of an experiment: a table, and mean curves of the best ones."""
    return page.render("experiment.html", **_context(page, experiment_id, []))


@router.get("/ui/experiments/{experiment_id}/parts/groups")
def groups_table(page: PageDep, experiment_id: ExperimentId, group: Drawn = []) -> HTMLResponse:  # noqa: B006
    """Render the table alone; `group`: the groups that the open page draws, by their first runs."""
    return page.render("parts/groups_table.html", **_context(page, experiment_id, group))


def _context(page: Page, experiment_id: int, drawn: Sequence[str]) -> dict[str, Any]:
    with page.service.database.reading() as session:
        experiment = find_experiment(session, experiment_id)
        groups, truncated = groups_of(session, experiment_id)
        found = [(group, _measured(figures_of(session, group, _CURVES, 0))) for group in groups]
    # Groups without a reward come last, in the order of their first runs.
    found.sort(key=lambda one: -_first(one[1]))
    drawn = drawn or [group.runs[0].uid for group, _ in found[:MAX_COMPARED]]
    names = options_of(groups)
    query = urlencode([("group", uid) for uid in drawn])
    runs = [run for group in groups for run in group.runs]
    return {
        "experiment": experiment,
        "names": names,
        "titles": [text.label(EXPERIMENT_FIGURES[name].curves[0]) for name in MEASURED],
        "rows": [_row(group, figures, names, drawn) for group, figures in found],
        "figures": EXPERIMENT_FIGURES.values(),
        "query": f"?{query}",
        "one_group": ONE_GROUP,
        "runs": len(runs),
        "unfinished": sum(run.status in PERHAPS_ACTIVE for run in runs),
        "is_live": any(run.status in ACTIVE for run in runs),
        "most_drawn": MAX_COMPARED,
        "most_axes": MOST_AXES,
        "most_runs": MOST_RUNS if truncated else 0,
        "piece_url": f"/ui/experiments/{experiment_id}/parts/groups?{query}",
    }


def _measured(found: Sequence[GroupFigureView]) -> dict[str, GroupFigureView]:
    """Return the curve of each measured figure: its first candidate with values."""
    by_name = {one.name: one for one in found}
    candidates = {name: [by_name[curve] for curve in EXPERIMENT_FIGURES[name].curves] for name in MEASURED}
    return {name: next((one for one in of if one.final.runs), of[0]) for name, of in candidates.items()}


def _first(figures: Mapping[str, GroupFigureView]) -> float:
    mean = figures[MEASURED[0]].final.mean
    return float("-inf") if mean is None else mean


def _row(group: Group, figures: Mapping[str, GroupFigureView], names: Sequence[str], drawn: Sequence[str]) -> Row:
    counts = Counter(run.status for run in group.runs)
    uids = [run.uid for run in group.runs]
    compared = f"/compare?{urlencode([('run', uid) for uid in uids[:MAX_COMPARED]])}"
    index = drawn.index(uids[0]) if uids[0] in drawn else None
    return Row(
        options=tuple(option_value(group, name).words for name in names),
        runs=len(uids),
        statuses=", ".join(f"{count} {status}" for status, count in counts.items()),
        href=compared if len(uids) > 1 else f"/runs/{uids[0]}",
        figures=tuple(
            (_written(of.final, share) or text.NO_VALUE, _written(of.best, share))
            for name, of in figures.items()
            for share in (EXPERIMENT_FIGURES[name].share,)
        ),
        color="" if index is None else palette.series_color(index),
        dash="" if index is None else palette.svg_dash(index),
    )


def _written(of: SpreadView, share: bool) -> str:
    """Return mean and standard deviation with the same digits, "0.612 ± 0.021", or "" without values."""
    if of.mean is None:
        return ""
    mean = text.percent(of.mean) if share else text.number(of.mean)
    if of.deviation is None:
        return mean
    digits = None if "e" in mean else len(mean.partition(".")[2])
    return f"{mean} ± {text.percent(of.deviation) if share else text.number(of.deviation, digits)}"
