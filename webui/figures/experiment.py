"""The figures of an experiment: `/ui/experiments/<id>/figures/<name>?group=<uid>&group=<uid>`.

A group is named by the uid of its first run, so that it keeps its colour while runs are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from plotly.graph_objects import Figure
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.api.read.comparison import MAX_COMPARED
from rhyme_openrlhf.api.read.curves import MOST_POINTS, POINTS
from rhyme_openrlhf.api.read.groups import Group, figures_of, groups_of
from rhyme_openrlhf.api.read.run_values import METRIC, values_of
from rhyme_openrlhf.api.store.bounds import UidText
from rhyme_openrlhf.webui.figures.drawing.comparison import of_groups
from rhyme_openrlhf.webui.figures.drawing.parallel import Line, Place, parallel_coordinates
from rhyme_openrlhf.webui.figures.run_figure import Window
from rhyme_openrlhf.webui.figures.several_runs import RUNS_FIGURES, RunsFigure
from rhyme_openrlhf.webui.site import text

ONE_GROUP = "all runs"
# Most letters of a value in a figure; options in a group's name; options that are axes.
WIDTH, MOST_NAMED, MOST_AXES = 22, 4, 12
# Name of the figure of all runs.
PARALLEL = "parallel"
# What came of a run; the last one classifies runs.
RESULTS = ("throughput", "reward")
NO_GROUP = Group({}, [], [])


class ExperimentWindow(BaseModel):
    """The query parameters of a figure of an experiment. `group`: the groups to draw, by their first runs."""

    model_config = ConfigDict(extra="forbid")

    group: Annotated[list[UidText], Field(min_length=1, max_length=MAX_COMPARED)]
    points: int = Field(default=POINTS, ge=4, le=MOST_POINTS)


def mean_curves(session: Session, experiment_id: int, figure: RunsFigure, window: ExperimentWindow) -> Figure:
    """Draw the mean of a figure's curve for each group."""
    groups = {group.runs[0].uid: group for group in groups_of(session, experiment_id)[0]}
    names = options_of(groups.values())
    drawn = []
    for uid in window.group:
        # A group that is gone keeps its place, so that the others keep their colours.
        found = figures_of(session, groups.get(uid, NO_GROUP), figure.curves, window.points)
        shown = next((one for one in found if one.final.runs), found[0])
        assert shown.curve is not None
        drawn.append((group_name(groups.get(uid, NO_GROUP), names), shown.curve))
    return of_groups(drawn, Window(), text.label(figure.curves[0]), figure.share)


def options_of(groups: Iterable[Group]) -> list[str]:
    """Return the names of the options in which the groups differ."""
    return list(dict.fromkeys(name for group in groups for name in group.options))


def group_name(group: Group, names: Sequence[str]) -> str:
    """Return a group's name by its values of these options, such as "lr 1e-06, histospec off"."""
    short = [name.removesuffix(".enable").rpartition(".")[2] for name in names]
    shown = short if len(set(short)) == len(short) else names
    words = [f"{name} {_cut(option_value(group, key).words)}" for name, key in zip(shown, names, strict=True)]
    rest = ["…"] if len(words) > MOST_NAMED else []
    return ", ".join(words[:MOST_NAMED] + rest) or ONE_GROUP


def option_value(group: Group, key: str) -> Place:
    """Return a group's value of an option; a group that does not set it has the default."""
    if key in group.options:
        value = group.options[key]
        # Random draws have sixteen digits.
        words = f"{value:.4g}" if isinstance(value, float) else text.written(value)
        return _option_place(value, words)
    room, _, name = key.partition(".")
    option = options().get((room, name))
    if option is None:
        return Place("default", "default")
    return _option_place(option.default, f"{text.written(option.default) or text.NO_VALUE} (default)")


def _option_place(value: Any, words: str) -> Place:
    """Return the place of an option's value; an option without one has a place too."""
    return Place("" if value is None else value, words or text.NO_VALUE)


def _cut(words: str) -> str:
    """Return the end of a long value, which tells paths apart."""
    return words if len(words) <= WIDTH else f"…{words[1 - WIDTH :]}"


def parallel(session: Session, experiment_id: int) -> Figure:
    """Draw a line for each run through the options in which the groups differ, to what came of it."""
    groups, _ = groups_of(session, experiment_id)
    names = options_of(groups)[:MOST_AXES]
    results = [[f"{METRIC}{curve}" for curve in RUNS_FIGURES[name].curves] for name in RESULTS]
    curves = [name for candidates in results for name in candidates]
    values = values_of(session, [run.id for group in groups for run in group.runs], curves)
    lines = []
    for group in groups:
        places = [option_value(group, name) for name in names]
        options = [Place(place.value, _cut(place.words)) for place in places]
        for run in group.runs:
            known = {name: value for name, value in values[run.id].items() if isinstance(value, float)}
            last = [next((known[name] for name in candidates if name in known), None) for candidates in results]
            lines.append(Line(run.name, (*options, *(Place(one, text.number(one)) for one in last))))
    titles = [text.label(RUNS_FIGURES[name].curves[0]) for name in RESULTS]
    return parallel_coordinates([*names, *titles], lines)


EXPERIMENT_FIGURES: dict[str, RunsFigure] = {name: figure for name, figure in RUNS_FIGURES.items() if figure.curves}
