"""A figure of a run: its query, what it draws, its options, and the steps that it shows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from plotly.graph_objects import Figure
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curves import MOST_POINTS, POINTS, Axis, Curve, curves
from rhyme_openrlhf.api.read.smoothing import MOST_WEIGHT
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import Interval, Step
from rhyme_openrlhf.webui.figures.drawing.chart import Chart, Curves

# Default and largest number of steps whose single intervals and samples a figure shows.
STEPS_SHOWN = 3
MOST_STEPS_SHOWN = 60


class Window(BaseModel):
    """The query parameters of a figure; a figure with more parameters has a subclass of it as `options`.

    `scale`: the y axis of figures whose values are easier to compare on a logarithmic axis. `smooth`: the weight of the
    moving average that is drawn over each line.
    """

    model_config = ConfigDict(extra="forbid")

    from_step: int = Field(default=0, ge=0, le=INT32)
    to_step: int = Field(default=INT32, ge=0, le=INT32)
    axis: Axis = "step"
    scale: Literal["linear", "log"] = "linear"
    smooth: float = Field(default=0.0, ge=0, le=MOST_WEIGHT)
    points: int = Field(default=POINTS, ge=4, le=MOST_POINTS)


class StepsShown(BaseModel):
    """A window of `steps` steps that ends at `step`, or at the newest step, which follows a live run."""

    model_config = ConfigDict(extra="forbid")

    step: int | None = Field(default=None, ge=1, le=INT32)
    steps: int = Field(default=STEPS_SHOWN, ge=1, le=MOST_STEPS_SHOWN)


@dataclass(frozen=True)
class RunFigure(ABC):
    """A figure of a run. `ask(session, run, options)` reads the rows."""

    name: str
    title: str
    ask: Callable[[Session, Run, Any], Any]
    options: type[BaseModel] = field(default=Window, kw_only=True)

    @abstractmethod
    def draw(self, rows: Any, options: Any) -> Figure:
        """Draw the rows; pure."""


@dataclass(frozen=True)
class RunChart(Chart, RunFigure):
    """A figure of a run that is a chart."""


@dataclass(frozen=True)
class RunCurves(Curves, RunFigure):
    """A figure of a run that is a chart of its curves."""


@dataclass(frozen=True)
class RunDrawing(RunFigure):
    """A figure of a run that is no chart, with its pure drawing function."""

    drawing: Callable[[Any, Any], Figure]

    def draw(self, rows: Any, options: Any) -> Figure:
        """Draw the rows."""
        return self.drawing(rows, options)


def curves_of(*names: str) -> Callable[[Session, Run, Window], dict[str, Curve]]:
    """Return a query for curves by their names in `api/read/curves.py`."""

    def ask(session: Session, run: Run, window: Window) -> dict[str, Curve]:
        found = curves(
            session, run.uid, names, window.from_step, window.to_step, window.points, window.axis, window.smooth
        )
        return {curve.name: curve for curve in found}

    return ask


def newest_step(session: Session, run: Run) -> int:
    """Return the newest step with reports of engines, else the newest step, else 0."""
    reported = session.scalar(select(func.max(Interval.step)).where(Interval.run_id == run.id))
    if reported is not None:
        return reported
    return session.scalar(select(func.max(Step.step)).where(Step.run_id == run.id)) or 0


def shown_steps(session: Session, run: Run, options: StepsShown) -> tuple[int, int]:
    """Return the first and the last step of the window."""
    last = options.step if options.step is not None else newest_step(session, run)
    return max(1, last - options.steps + 1), last
