"""The registry of figures of several runs: `/ui/figures/<name>?run=<uid>&run=<uid>&axis=time`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from plotly.graph_objects import Figure
from pydantic import Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.comparison import MAX_COMPARED
from rhyme_openrlhf.api.read.curves import curves
from rhyme_openrlhf.api.store.bounds import UidText
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import METRIC_LENGTH
from rhyme_openrlhf.webui.figures.drawing.chart import has_values
from rhyme_openrlhf.webui.figures.drawing.comparison import of_runs
from rhyme_openrlhf.webui.figures.run_figure import Window
from rhyme_openrlhf.webui.site import text


class RunsWindow(Window):
    """The query parameters of a figure of several runs. `metric`: the curve that the figure "metric" draws."""

    run: Annotated[list[UidText], Field(min_length=1, max_length=MAX_COMPARED)]
    metric: str = Field(default="", max_length=METRIC_LENGTH, pattern=r"^[^\x00]*$")


@dataclass(frozen=True)
class RunsFigure:
    """A figure of several runs.

    `curves`: candidates; the first with values is drawn for a run. If empty, the option `metric` names the curve.
    `share`: its values are shares from 0 to 1.
    """

    name: str
    title: str
    curves: tuple[str, ...]
    share: bool = False

    def draw(self, session: Session, options: RunsWindow) -> Figure:
        """Draw the figure; raise NotFoundError if a run does not exist."""
        wanted = self.curves or (options.metric,)
        found = []
        runs = [find_run(session, uid) for uid in options.run]
        for run, name in zip(runs, run_names(runs), strict=True):
            asked = curves(
                session, run.uid, wanted, options.from_step, options.to_step, options.points, options.axis,
                options.smooth,
            )  # fmt: skip
            found.append((name, next((curve for curve in asked if has_values(curve)), asked[0])))
        return of_runs(found, options, text.label(wanted[0]), self.share)


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return names that tell these runs apart; runs with the same name get the beginning of their uid."""
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else f"{run.name} ({run.uid[:4]})" for run in runs]


RUNS_FIGURES: dict[str, RunsFigure] = {
    figure.name: figure
    for figure in (
        RunsFigure("reward", "Reward", ("reward", "rollout_reward")),
        RunsFigure("throughput", "Throughput", ("tokens_per_second",)),
        RunsFigure("step-time", "Step time", ("step_seconds",)),
        RunsFigure("speculation", "Speculation rate", ("speculation_rate",), share=True),
        RunsFigure("bubbles", "Bubble fraction", ("bubble_fraction",), share=True),
        RunsFigure("length", "Response length", ("length_mean",)),
        RunsFigure("metric", "Metric", ()),
    )
}
