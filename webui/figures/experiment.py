"""The figures of an experiment: `/ui/experiments/<id>/figures/<name>?group=<uid>&group=<uid>`.

A group is named by the uid of its first run, so that it keeps its colour while runs are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from plotly.graph_objects import Figure
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.api.read.comparison import MAX_COMPARED
from rhyme_openrlhf.api.read.curves import MOST_POINTS, POINTS
from rhyme_openrlhf.api.read.groups import Group, figures_of, grouped, runs_of
from rhyme_openrlhf.api.store.bounds import UidText
from rhyme_openrlhf.webui.figures.drawing.groups import of_groups
from rhyme_openrlhf.webui.figures.several_runs import RUNS_FIGURES, RunsFigure
from rhyme_openrlhf.webui.site import text

ONE_GROUP = "all runs"
NO_GROUP = Group({}, [])


class ExperimentWindow(BaseModel):
    """The query parameters of a figure of an experiment. `group`: the groups to draw, by their first runs."""

    model_config = ConfigDict(extra="forbid")

    group: Annotated[list[UidText], Field(min_length=1, max_length=MAX_COMPARED)]
    points: int = Field(default=POINTS, ge=4, le=MOST_POINTS)


def mean_curves(session: Session, experiment_id: int, figure: RunsFigure, window: ExperimentWindow) -> Figure:
    """Draw the mean of a figure's curve for each group."""
    groups = {group.runs[0].uid: group for group in grouped(runs_of(session, experiment_id)[0])}
    names = options_of(groups.values())
    drawn = []
    for uid in window.group:
        # A group that is gone keeps its place, so that the others keep their colours.
        found = figures_of(session, groups.get(uid, NO_GROUP), figure.curves, window.points)
        shown = next((one for one in found if one.final.runs), found[0])
        assert shown.curve is not None
        drawn.append((group_name(groups.get(uid, NO_GROUP), names), shown.curve))
    return of_groups(drawn, text.label(figure.curves[0]), figure.share)


def options_of(groups: Iterable[Group]) -> list[str]:
    """Return the names of the options in which the groups differ."""
    return list(dict.fromkeys(name for group in groups for name in group.options))


def group_name(group: Group, names: Sequence[str]) -> str:
    """Return a group's name by its values of these options, such as "lr 1e-06, window_max 8"."""
    short = [name.rpartition(".")[2] for name in names]
    shown = short if len(set(short)) == len(short) else names
    return ", ".join(f"{word} {option_value(group, key)}" for word, key in zip(shown, names, strict=True)) or ONE_GROUP


def option_value(group: Group, key: str) -> str:
    """Return a group's value of an option in words; a group that does not set it has the default."""
    if key in group.options:
        value = group.options[key]
        # Random draws have sixteen digits.
        return f"{value:.4g}" if isinstance(value, float) else text.written(value) or text.NO_VALUE
    room, _, name = key.partition(".")
    option = options().get((room, name))
    return "default" if option is None else f"{text.written(option.default) or text.NO_VALUE} (default)"


EXPERIMENT_FIGURES: dict[str, RunsFigure] = {name: figure for name, figure in RUNS_FIGURES.items() if figure.curves}
