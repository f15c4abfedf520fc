"""The registry of a run's figures: what each one asks, and the pure function that draws it.

A figure is one line in `RUN_FIGURES`; its address is `/ui/runs/<uid>/figures/<name>`, its place in a template
`{{ figure("<name>", uid) }}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plotly.graph_objects import Figure
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.curves import Axis, Curve, curves
from rhyme_openrlhf.api.fields import INT32
from rhyme_openrlhf.api.models import Run
from rhyme_openrlhf.webui.figures import learning, system
from rhyme_openrlhf.webui.machine_window import MachineWindow, ask_caches, ask_system

# A chart's width in pixels, and more than any has.
POINTS = 500
MOST_POINTS = 5000


class Window(BaseModel):
    """The query parameters of a figure; one that takes more has a subclass of it as `options`."""

    model_config = ConfigDict(extra="forbid")

    from_step: int = Field(default=0, ge=0, le=INT32)
    to_step: int = Field(default=INT32, ge=0, le=INT32)
    axis: Axis = "step"
    points: int = Field(default=POINTS, ge=4, le=MOST_POINTS)


@dataclass(frozen=True)
class RunFigure:
    """`ask(session, run, options)` gives the rows; `draw(rows, options)` is pure."""

    name: str
    title: str
    ask: Callable[[Session, Run, Any], Any]
    draw: Callable[[Any, Any], Figure]
    options: type[BaseModel] = Window


def curves_of(*names: str) -> Callable[[Session, Run, Window], dict[str, Curve]]:
    """Asks for curves by their names in `api/curves.py`."""

    def ask(session: Session, run: Run, window: Window) -> dict[str, Curve]:
        found = curves(session, run, names, window.from_step, window.to_step, window.points, window.axis)
        return {curve.name: curve for curve in found}

    return ask


SYSTEM: tuple[RunFigure, ...] = (
    RunFigure("system-cpu", "Processors", ask_system, system.cpu, MachineWindow),
    RunFigure("system-memory", "Memory", ask_system, system.memory, MachineWindow),
    RunFigure("system-process-cpu", "Processors by process", ask_system, system.process_cpu, MachineWindow),
    RunFigure("system-process-memory", "Memory by process", ask_system, system.process_memory, MachineWindow),
    RunFigure("system-gpu", "GPU use", ask_system, system.gpu, MachineWindow),
    RunFigure("system-gpu-memory", "GPU memory", ask_system, system.gpu_memory, MachineWindow),
    RunFigure("system-kv-cache", "KV cache in use", ask_caches, system.kv_cache, MachineWindow),
    RunFigure("system-store", "Object store and shared memory", ask_system, system.store, MachineWindow),
    RunFigure("system-disk", "Free disk space", ask_system, system.disk, MachineWindow),
)
RUN_FIGURES: dict[str, RunFigure] = {
    figure.name: figure
    for figure in (
        RunFigure("reward", "Reward over steps", curves_of("reward", "rollout_reward"), learning.reward),
        *SYSTEM,
    )
}
FIGURE_TITLES: dict[str, str] = {name: figure.title for name, figure in RUN_FIGURES.items()}
