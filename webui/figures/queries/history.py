"""What the figures of the draft history ask."""

from __future__ import annotations

from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.webui.figures.drawing import history as drawing
from rhyme_openrlhf.webui.figures.drawing.history import HistoryState
from rhyme_openrlhf.webui.figures.queries.raw import latest
from rhyme_openrlhf.webui.figures.run_figure import RunFigure, Window

# One a worker and step: 4 workers' last 500 steps, parsed in some 5 ms.
MOST_STATES = 2000


def _states(session: Session, run: Run, window: Window) -> list[HistoryState]:
    found = latest(session, run, "history_state", HistoryState, MOST_STATES, by=("step", "worker")).bodies
    return sorted(found, key=lambda one: (one.step, one.worker))


FIGURES: tuple[RunFigure, ...] = (
    RunFigure("history_answers", "What engines found when they asked", _states, drawing.answers),
    RunFigure("history_prompts", "Prompts with a history", _states, drawing.prompts),
    RunFigure("history_memory", "Room that the history takes", _states, drawing.memory),
)
