"""A figure of a run: its query, its pure drawing function, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from plotly.graph_objects import Figure
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.curves import MOST_POINTS, POINTS, Axis, Curve, curves
from rhyme_openrlhf.api.read.smoothing import MOST_WEIGHT
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.models import Run

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
class RunFigure:
    """A figure of a run. `ask(session, run, options)` reads the rows; `draw(rows, options)` is pure."""

    name: str
    title: str
    ask: Callable[[Session, Run, Any], Any]
    draw: Callable[[Any, Any], Figure]
    options: type[BaseModel] = Window


def curves_of(*names: str) -> Callable[[Session, Run, Window], dict[str, Curve]]:
    """Return a query for curves by their names in `api/read/curves.py`."""

    def ask(session: Session, run: Run, window: Window) -> dict[str, Curve]:
        found = curves(
            session, run.uid, names, window.from_step, window.to_step, window.points, window.axis, window.smooth
        )
        return {curve.name: curve for curve in found}

    return ask
