"""Queries of the machine figures, for the last hours or all of a run, and for one machine or all."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.system import CacheSample, MachineSample, cache_samples, machine_samples
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import NODE_LENGTH
from rhyme_openrlhf.webui.figures.drawing import system as drawing
from rhyme_openrlhf.webui.figures.run_figure import RunFigure

_HOUR = 3600.0
# One year, longer than any run.
MOST_HOURS = 8760.0


class MachineWindow(BaseModel):
    """The last `hours` before the run's last event, 0 for the whole run; `node`: one machine, "" for all."""

    model_config = ConfigDict(extra="forbid")

    hours: float = Field(default=0.0, ge=0, le=MOST_HOURS, allow_inf_nan=False)
    node: str = Field(default="", max_length=NODE_LENGTH, pattern=NO_NUL)

    def since(self, run: Run) -> float:
        """Return the start of the window in unix seconds, 0 for the whole run."""
        return run.last_event_at - self.hours * _HOUR if self.hours and run.last_event_at else 0.0


def ask_system(session: Session, run: Run, window: MachineWindow) -> list[MachineSample]:
    """Return the machines' samples."""
    return machine_samples(session, run, window.since(run), window.node)


def ask_caches(session: Session, run: Run, window: MachineWindow) -> list[CacheSample]:
    """Return the engines' samples of all machines, because the record does not say where an engine runs."""
    return cache_samples(session, run, window.since(run))


FIGURES: tuple[RunFigure, ...] = (
    RunFigure("system-cpu", "Processors", ask_system, drawing.cpu, MachineWindow),
    RunFigure("system-memory", "Memory", ask_system, drawing.memory, MachineWindow),
    RunFigure("system-process-cpu", "Processors by process", ask_system, drawing.process_cpu, MachineWindow),
    RunFigure("system-process-memory", "Memory by process", ask_system, drawing.process_memory, MachineWindow),
    RunFigure("system-gpu", "GPU use", ask_system, drawing.gpu, MachineWindow),
    RunFigure("system-gpu-memory", "GPU memory", ask_system, drawing.gpu_memory, MachineWindow),
    RunFigure("system-kv-cache", "KV cache in use", ask_caches, drawing.kv_cache, MachineWindow),
    RunFigure("system-store", "Object store and shared memory", ask_system, drawing.store, MachineWindow),
    RunFigure("system-disk", "Free disk space", ask_system, drawing.disk, MachineWindow),
)
