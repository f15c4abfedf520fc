"""The registry of a run's figures.

A figure is one line in the `FIGURES` of a module in `subjects/`. Its address is `/ui/runs/<uid>/figures/<name>`, and a
template includes it with `{{ figure("<name>", uid) }}`.
"""

from __future__ import annotations

from rhyme_openrlhf.webui.figures.run_figure import RunFigure
from rhyme_openrlhf.webui.figures.subjects import (
    bubbles,
    engines,
    history,
    learning,
    metrics,
    ranks,
    scheduling,
    speculation,
    system,
    timeline,
)

_SUBJECTS = (timeline, bubbles, speculation, engines, history, ranks, scheduling, learning, metrics, system)
RUN_FIGURES: dict[str, RunFigure] = {figure.name: figure for subject in _SUBJECTS for figure in subject.FIGURES}
FIGURE_TITLES: dict[str, str] = {name: figure.title for name, figure in RUN_FIGURES.items()}
