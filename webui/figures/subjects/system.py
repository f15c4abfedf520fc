"""Figures of a run's machines: processors, memory, disk, GPUs, KV caches, Ray's object store.

They show the last hours or all of a run, and one machine or all. Up to `LINES` machines have a line each; more are
drawn as their mean, the busiest and the least busy one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.downsampling import downsample
from rhyme_openrlhf.api.read.system import CacheSample, MachineSample, cache_samples, machine_samples
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import NODE_LENGTH
from rhyme_openrlhf.webui.figures.drawing.chart import Content, Words
from rhyme_openrlhf.webui.figures.drawing.series import Line
from rhyme_openrlhf.webui.figures.run_figure import RunChart, RunFigure

_HOUR = 3600.0
# One year, longer than any run.
MOST_HOURS = 8760.0
# Most lines that the palette can tell apart.
LINES = 8
# Width of a chart in pixels.
POINTS = 500
# Number of time bins in which samples of different machines or engines are combined.
STRETCHES = 200
GIGABYTE = 1024**3
NOT_RECORDED = (
    "This run has recorded nothing about its machines; --telemetry.system_s above 0 records them every few seconds."
)
NO_GPU = "No GPU was seen on this run's machines."
NO_CACHE = (
    "No engine of this run has reported its use of the KV cache; engines of newer versions report it once a second."
)
OTHERS = "others"

# Lines by name: (unix time, value).
Points = Mapping[str, Sequence[tuple[float, float]]]
Machines = Sequence[MachineSample]


class MachineWindow(BaseModel):
    """The last `hours` before the run's last event, 0 for the whole run; `node`: one machine, "" for all."""

    model_config = ConfigDict(extra="forbid")

    hours: float = Field(default=0.0, ge=0, le=MOST_HOURS, allow_inf_nan=False)
    node: str = Field(default="", max_length=NODE_LENGTH, pattern=NO_NUL)

    def since(self, run: Run) -> float:
        """Return the start of the window in unix seconds, 0 for the whole run."""
        return run.last_event_at - self.hours * _HOUR if self.hours and run.last_event_at else 0.0


def _ask_system(session: Session, run: Run, window: MachineWindow) -> list[MachineSample]:
    """Return the machines' samples."""
    return machine_samples(session, run, window.since(run), window.node)


def _ask_caches(session: Session, run: Run, window: MachineWindow) -> list[CacheSample]:
    """Return the engines' samples of all machines, because the record does not say where an engine runs."""
    return cache_samples(session, run, window.since(run))


def _collected(values: Iterable[tuple[Any, float, float | None]]) -> dict[Any, list[tuple[float, float]]]:
    """Collect the known ones of (line, time, value) by line, ordered by name."""
    found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for name, time, value in values:
        if value is not None:
            found[name].append((time, value))
    return dict(sorted(found.items()))


def _per_node(value: Callable[[MachineSample], float | None]) -> Callable[[Machines], Points]:
    return lambda rows: _collected((row.node, row.time, value(row)) for row in rows)


def _per_gpu(values: Callable[[MachineSample], Sequence[float | None]]) -> Callable[[Machines], Points]:
    return lambda rows: _collected(
        (f"{row.node} GPU {number}", row.time, value) for row in rows for number, value in enumerate(values(row))
    )


def _store(rows: Machines) -> Points:
    """Return the use of Ray's object store, and of /dev/shm, which holds the store and the shared weights."""
    return _collected(
        (f"{part}, {row.node}", row.time, None if used is None else used / GIGABYTE)
        for row in rows
        for part, used in (("object store", row.object_store), ("shared memory", row.shared_memory))
    )


def _per_engine(rows: Sequence[CacheSample]) -> Points:
    found = _collected((row.engine, row.time, row.kv_cache) for row in rows)
    return {f"engine {engine}": points for engine, points in found.items()}


def _per_process(rows: Machines, values: Callable[[MachineSample], Mapping[str, float | None]], unit: float) -> Points:
    """Return the processes with the largest means, by name, and by machine if there are several.

    Smaller processes are added up as `OTHERS`.
    """
    several = len({row.node for row in rows}) > 1
    sums: dict[str, float] = defaultdict(float)
    looks: list[tuple[float, dict[str, float]]] = []
    for row in rows:
        mine = {
            f"{name}, {row.node}" if several else name: value
            for name, value in values(row).items()
            if value is not None
        }
        looks.append((row.time, mine))
        for name, value in mine.items():
            sums[name] += value
    ranked = sorted(sums, key=lambda name: (-sums[name], name))
    shown = ranked if len(ranked) <= LINES else ranked[: LINES - 1]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sorted(shown)}
    rest: dict[float, float] = defaultdict(float)
    for time, mine in looks:
        for name, value in mine.items():
            if name in found:
                found[name].append((time, value / unit))
            else:
                rest[time] += value / unit
    return found | ({OTHERS: sorted(rest.items())} if rest else {})


def _summed_up(found: Points, what: str) -> dict[str, list[tuple[float, float]]]:
    """Return mean, highest and lowest value over all lines in each time bin.

    A line counts once in a bin, with its mean there.
    """
    begin = min(points[0][0] for points in found.values())
    end = max(points[-1][0] for points in found.values())
    width = max((end - begin) / STRETCHES, 1e-9)
    stretches: dict[int, list[float]] = defaultdict(list)
    for points in found.values():
        mine: dict[int, list[float]] = defaultdict(list)
        for at, value in points:
            mine[min(int((at - begin) / width), STRETCHES - 1)].append(value)
        for number, values in mine.items():
            stretches[number].append(fmean(values))
    ordered = [(begin + (number + 0.5) * width, values) for number, values in sorted(stretches.items())]
    return {
        f"mean {what} of {len(found)}": [(at, fmean(values)) for at, values in ordered],
        f"highest {what}": [(at, max(values)) for at, values in ordered],
        f"lowest {what}": [(at, min(values)) for at, values in ordered],
    }


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-4]


def _figure(
    name: str, title: str, y: str, description: str, what: str, values: Callable[[Any], Points], *,
    share: bool = False, empty: Words = NOT_RECORDED, ask: Callable[..., Any] = _ask_system,
) -> RunChart:  # fmt: skip
    """Return the figure of these values of what `ask` returns; `what`: what one line is of."""

    def content(rows: Sequence[Any]) -> Content | None:
        found = values(rows)
        if not found:
            return None
        lines = []
        for name, points in (found if len(found) <= LINES else _summed_up(found, what)).items():
            x, shown = downsample([at for at, _ in points], [value for _, value in points], POINTS)
            lines.append(Line(name, [_moment(at) for at in x], shown, marked=2))
        lasts = [points[-1][1] for points in found.values()]
        low, high = (f"{value:.0%}" if share else f"{value:.2f}" for value in (min(lasts), max(lasts)))
        return Content(lines, f"Last: lowest {low}, highest {high}, of {len(found)}.")

    return RunChart(
        name, title, ask, content=content, x="Time (UTC)", counted="date", y=y, share=share, description=description,
        empty=empty, options=MachineWindow,
    )  # fmt: skip


def _no_gpu(rows: Machines) -> str:
    return NO_GPU if rows else NOT_RECORDED


FIGURES: tuple[RunFigure, ...] = (
    _figure(
        "system-cpu", "Processors", "Share of all cores", "Processor use of each machine.", "machine",
        _per_node(lambda row: row.cpu), share=True,
    ),
    _figure(
        "system-memory", "Memory", "Share of memory", "Memory in use on each machine.", "machine",
        _per_node(lambda row: row.memory_used / row.memory_total if row.memory_total else None), share=True,
    ),
    _figure(
        "system-process-cpu", "Processors by process", "Cores", "Processor cores that the run's processes keep busy.",
        "process", lambda rows: _per_process(rows, lambda row: row.process_cpu, 1),
    ),
    _figure(
        "system-process-memory", "Memory by process", "GB resident", "Memory of the run's processes.", "process",
        lambda rows: _per_process(rows, lambda row: row.process_memory, GIGABYTE),
    ),
    _figure(
        "system-gpu", "GPU use", "Share of time", "How busy each GPU was.", "GPU", _per_gpu(lambda row: row.gpu),
        share=True, empty=_no_gpu,
    ),
    _figure(
        "system-gpu-memory", "GPU memory", "Share of memory", "Memory in use on each GPU.", "GPU",
        _per_gpu(lambda row: [u / t for u, t in zip(row.gpu_memory_used, row.gpu_memory_total, strict=False) if t]),
        share=True, empty=_no_gpu,
    ),
    _figure(
        "system-kv-cache", "KV cache in use", "Share of the KV cache",
        "KV cache in use on each engine while it generates.", "engine", _per_engine,
        share=True, empty=NO_CACHE, ask=_ask_caches,
    ),
    _figure(
        "system-store", "Object store and shared memory", "GB in use",
        "Ray's object store and shared memory in use.", "part", _store,
    ),
    _figure(
        "system-disk", "Free disk space", "GB free", "Free disk space where the run directory is.", "machine",
        _per_node(lambda row: None if row.disk_free is None else row.disk_free / GIGABYTE),
    ),
)  # fmt: skip
