"""Figures of a run's machines: processors, memory, disk, GPUs, KV caches, Ray's object store.

Up to `LINES` machines have a line each; more are drawn as their mean, the busiest and the least busy one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean

import plotly.graph_objects as go

from rhyme_openrlhf.api.read.downsampling import downsample
from rhyme_openrlhf.api.read.system import CacheSample, MachineSample
from rhyme_openrlhf.webui.figures.drawing import palette
from rhyme_openrlhf.webui.figures.drawing.base import blank, plain

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

Points = Mapping[str, Sequence[tuple[float, float]]]


def _per_node(rows: Iterable[MachineSample], value: Callable[[MachineSample], float | None]) -> dict[str, list]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        known = value(row)
        if known is not None:
            found[row.node].append((row.time, known))
    return dict(sorted(found.items()))


def cpu(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the share of all cores in use on each machine."""
    found = _per_node(rows, lambda row: row.cpu)
    return _drawn(found, "machine", "Share of all cores", "Processor use of each machine.", NOT_RECORDED, share=True)


def memory(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the share of memory in use on each machine."""
    found = _per_node(rows, lambda row: row.memory_used / row.memory_total if row.memory_total else None)
    text = "Memory in use on each machine."
    return _drawn(found, "machine", "Share of memory", text, NOT_RECORDED, share=True)


def disk(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the free disk space of the run directory."""
    found = _per_node(rows, lambda row: None if row.disk_free is None else row.disk_free / GIGABYTE)
    return _drawn(found, "machine", "GB free", "Free disk space where the run directory is.", NOT_RECORDED)


def store(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the use of Ray's object store, and of /dev/shm, which holds the store and the shared weights."""
    kept = _per_node(rows, lambda row: None if row.object_store is None else row.object_store / GIGABYTE)
    shared = _per_node(rows, lambda row: None if row.shared_memory is None else row.shared_memory / GIGABYTE)
    found = {f"object store, {node}": points for node, points in kept.items()}
    found |= {f"shared memory, {node}": points for node, points in shared.items()}
    return _drawn(found, "part", "GB in use", "Ray's object store and shared memory in use.", NOT_RECORDED)


def gpu(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the share of time in which each GPU was busy."""
    empty = NO_GPU if rows else NOT_RECORDED
    found = _per_gpu(rows, lambda row: row.gpu)
    return _drawn(found, "GPU", "Share of time", "How busy each GPU was.", empty, share=True)


def gpu_memory(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the share of memory in use on each GPU."""
    found = _per_gpu(
        rows, lambda row: [u / t for u, t in zip(row.gpu_memory_used, row.gpu_memory_total, strict=False) if t]
    )
    empty = NO_GPU if rows else NOT_RECORDED
    return _drawn(found, "GPU", "Share of memory", "Memory in use on each GPU.", empty, share=True)


def _per_gpu(
    rows: Iterable[MachineSample], values: Callable[[MachineSample], Sequence[float | None]]
) -> dict[str, list]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        for number, value in enumerate(values(row)):
            if value is not None:
                found[f"{row.node} GPU {number}"].append((row.time, value))
    return dict(sorted(found.items()))


def kv_cache(rows: Sequence[CacheSample], options: object) -> go.Figure:
    """Draw the share of each engine's KV cache in use."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.engine):
        found[f"engine {row.engine}"].append((row.time, row.kv_cache))
    text = "KV cache in use on each engine while it generates."
    return _drawn(found, "engine", "Share of the KV cache", text, NO_CACHE, share=True)


def process_cpu(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the number of cores that each of the run's processes keeps busy."""
    text = "Processor cores that the run's processes keep busy."
    return _drawn(_per_process(rows, lambda row: row.process_cpu, 1), "process", "Cores", text, NOT_RECORDED)


def process_memory(rows: Sequence[MachineSample], options: object) -> go.Figure:
    """Draw the memory of each of the run's processes."""
    found = _per_process(rows, lambda row: row.process_memory, GIGABYTE)
    return _drawn(found, "process", "GB resident", "Memory of the run's processes.", NOT_RECORDED)


def _per_process(
    rows: Iterable[MachineSample], values: Callable[[MachineSample], Mapping[str, float | None]], unit: float
) -> dict[str, list]:
    """Return the processes with the largest means, by name, and by machine if there are several.

    Smaller processes are added up as `OTHERS`.
    """
    rows = list(rows)
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


def _drawn(found: Points, what: str, y_title: str, description: str, empty: str, share: bool = False) -> go.Figure:
    if not found:
        return blank(description, empty)
    lines = found if len(found) <= LINES else _summed_up(found, what)
    lasts = [points[-1][1] for points in found.values()]
    form = "{:.0%}" if share else "{:.2f}"
    described = f"{description} Last: lowest {form}, highest {form}, of {len(found)}.".format(min(lasts), max(lasts))
    figure = blank(described)
    for index, (name, points) in enumerate(lines.items()):
        x, y = downsample([at for at, _ in points], [value for _, value in points], POINTS)
        figure.add_trace(
            go.Scatter(
                x=[datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-4] for at in x],
                y=y,
                name=plain(name),
                mode="lines+markers" if len(x) == 1 else "lines",
                line={"color": palette.series_color(index), "dash": palette.series_dash(index), "width": 2},
            )
        )
    figure.update_layout(
        xaxis={"title": {"text": "Time (UTC)"}, "type": "date"},
        yaxis={"title": {"text": y_title}, "rangemode": "tozero", **({"tickformat": ".0%"} if share else {})},
        showlegend=len(lines) > 1,
        hovermode="x unified",
    )
    return figure


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
