"""The registry of a run's figures.

A figure is one line in the `FIGURES` of a module in `queries/`. Its address is `/ui/runs/<uid>/figures/<name>`, and a
template includes it with `{{ figure("<name>", uid) }}`.
"""

from __future__ import annotations

from rhyme_openrlhf.webui.figures.queries import learning, scheduling, speculation, system, timeline
from rhyme_openrlhf.webui.figures.run_figure import RunFigure

RUN_FIGURES: dict[str, RunFigure] = {
    figure.name: figure
    for figure in (
        *timeline.FIGURES,
        *speculation.FIGURES,
        *scheduling.FIGURES,
        *learning.FIGURES,
        *system.FIGURES,
    )
}
FIGURE_TITLES: dict[str, str] = {name: figure.title for name, figure in RUN_FIGURES.items()}
