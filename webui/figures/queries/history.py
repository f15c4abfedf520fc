"""Queries of the draft history's figures."""

from __future__ import annotations

from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.webui.figures.drawing import history as drawing
from rhyme_openrlhf.webui.figures.drawing.history import HistoryState
from rhyme_openrlhf.webui.figures.queries.raw import latest
from rhyme_openrlhf.webui.figures.run_figure import RunFigure, Window

# One event per worker and step: the last 500 steps of 4 workers, parsed in about 5 ms.
MOST_STATES = 2000


def _states(session: Session, run: Run, window: Window) -> list[HistoryState]:
    found = latest(session, run, "history_state", HistoryState, MOST_STATES, by=("step", "worker")).bodies
    return sorted(found, key=lambda one: (one.step, one.worker))


FIGURES: tuple[RunFigure, ...] = (
    RunFigure("history_answers", "Results of draft lookups", _states, drawing.answers),
    RunFigure("history_prompts", "Prompts with a history", _states, drawing.prompts),
    RunFigure("history_memory", "Memory and disk space of the history", _states, drawing.memory),
)
