"""Samples of a run's machines and KV caches: as curves, and one by one.

Invariant: a query returns at most about `MAX_ROWS` samples. If there are more, a uniform subset is read, so no machine
is left out, and the same query returns the same samples.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from pydantic import Field
from sqlalchemy import ColumnElement, Integer, cast, func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.downsampling import downsample
from rhyme_openrlhf.api.store.bounds import View
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineSampleRow, SystemRow

# Read and drawn in a quarter of a second, because the page loads several figures; 12 points for each of 500 pixels.
MAX_ROWS = 6_000
# More machines than a choice can list.
MOST_NODES = 500
# Two primes: ids times the first spread evenly over the remainders of the second.
_SPREAD, _PARTS = 7919, 104_729

SystemName = Literal[
    "cpu", "load", "memory_used", "disk_free", "shared_memory", "object_store", "gpu", "gpu_memory_used", "kv_cache"
]
KV_CACHE = "kv_cache"


@dataclass(frozen=True)
class MachineSample:
    """One SystemSample (fields: telemetry/events.py); `time` in unix seconds."""

    node: str
    time: float
    cpu: float | None
    memory_used: int
    memory_total: int
    disk_free: int | None = None
    shared_memory: int | None = None
    object_store: int | None = None
    gpu: tuple[float | None, ...] = ()
    gpu_memory_used: tuple[float, ...] = ()
    gpu_memory_total: tuple[float, ...] = ()
    process_cpu: Mapping[str, float | None] = field(default_factory=dict)
    process_memory: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheSample:
    """Share of an engine's KV cache in use, 0 to 1; `time` in unix seconds."""

    engine: int
    time: float
    kv_cache: float


class SystemCurveView(View):
    """A curve of one machine, down-sampled with its extremes."""

    of: str = Field(description="The machine; for `kv_cache` the engine's number.")
    name: str
    x: list[float] = Field(description="Unix seconds.")
    values: list[float | None]
    count: int = Field(description="Points before down-sampling.")


class ProcessView(View):
    """A process of the run, including its child processes."""

    name: str = Field(examples=["engine 0"])
    cores: float | None
    memory: int = Field(description="Resident bytes.")


class NodeView(View):
    """A machine at its last sample."""

    node: str
    time: float
    memory_total: int
    gpus: int
    processes: list[ProcessView]


def system_curves(
    session: Session, run: Run, names: Sequence[SystemName], begin: float, end: float, points: int
) -> tuple[list[SystemCurveView], list[NodeView]]:
    """Return curves of every machine (for `kv_cache`, of every engine) between two moments, and its last sample.

    Up to `MAX_ROWS` samples are all read. With more, the database computes the smallest and the largest value of each
    time bin. Curves of GPUs then use about `MAX_ROWS` samples, because their columns are texts that it cannot compare.
    """
    window = (SystemRow.run_id == run.id, SystemRow.time >= begin, SystemRow.time <= end)
    count = session.scalar(select(func.count()).where(*window)) or 0
    if count <= MAX_ROWS:
        curves, last = _all_curves(session, window, names, points)
    else:
        curves, last = _stretched_curves(session, window, count, names, points)
    if KV_CACHE in names:
        curves += _kv_curves(session, run, begin, end, points)
    return curves, [_now(row) for _, row in sorted(last.items())]


def machine_samples(session: Session, run: Run, since: float, node: str = "") -> list[MachineSample]:
    """Return samples of all attempts from unix time `since` on, by time; `node` "" stands for all machines."""
    of = SystemRow
    window = [of.run_id == run.id, of.time >= since, *([of.node == node] if node else [])]
    names = ("node", "time", "cpu", "memory_used", "memory_total", "disk_free", "shared_memory", "object_store")
    columns = [*(getattr(of, name) for name in names), of.gpus, of.processes]
    found = []
    for *values, gpus_text, processes_text in _thinned(session, of.id, columns, window):
        gpus, processes = msgspec.json.decode(gpus_text), msgspec.json.decode(processes_text)
        busy, used, total = zip(*gpus, strict=True) if gpus else ((), (), ())
        found.append(
            MachineSample(
                **dict(zip(names, values, strict=True)),
                gpu=busy,
                gpu_memory_used=used,
                gpu_memory_total=total,
                process_cpu={name: cores for name, (cores, _) in processes.items()},
                process_memory={name: memory for name, (_, memory) in processes.items()},
            )
        )
    return sorted(found, key=lambda one: one.time)


def cache_samples(session: Session, run: Run, since: float) -> list[CacheSample]:
    """Return the samples with a KV cache share from unix time `since` on, by time."""
    of = EngineSampleRow
    window = [of.run_id == run.id, of.time >= since, of.kv_cache.is_not(None)]
    rows = _thinned(session, of.id, (of.engine, of.time, of.kv_cache), window)
    return sorted((CacheSample(*row) for row in rows), key=lambda one: one.time)


def nodes_of(session: Session, run: Run) -> list[str]:
    """Return the machines among the newest samples, by name."""
    newest = select(SystemRow.node).where(SystemRow.run_id == run.id).order_by(SystemRow.time.desc()).limit(MOST_NODES)
    return sorted(set(session.scalars(newest)))


def _thinned(session: Session, ids: Any, columns: Sequence[Any], window: Sequence[ColumnElement[bool]]) -> Any:
    """Return the columns of at most about `MAX_ROWS` rows of a window."""
    count = session.scalar(select(func.count()).where(*window)) or 0
    further = [_spread(ids, count, MAX_ROWS)] if count > MAX_ROWS else []
    return session.execute(select(*columns).where(*window, *further).order_by(ids))


def _spread(ids: Any, count: int, most: int) -> ColumnElement[bool]:
    """Return a condition on `ids` that about `most` of `count` rows meet, always the same ones."""
    condition: ColumnElement[bool] = (ids * _SPREAD) % _PARTS < _PARTS * most // count
    return condition


def _all_curves(
    session: Session, window: Sequence[ColumnElement[bool]], names: Sequence[SystemName], points: int
) -> tuple[list[SystemCurveView], dict[str, SystemRow]]:
    by_node: dict[str, list[SystemRow]] = defaultdict(list)
    for row in session.scalars(select(SystemRow).where(*window).order_by(SystemRow.time, SystemRow.id)):
        by_node[row.node].append(row)
    curves = [
        _curve(node, name, [row.time for row in rows], [_value(row, name) for row in rows], points)
        for name in names
        if name != KV_CACHE
        for node, rows in sorted(by_node.items())
    ]
    return curves, {node: rows[-1] for node, rows in by_node.items()}


def _stretched_curves(
    session: Session, window: Sequence[ColumnElement[bool]], count: int, names: Sequence[SystemName], points: int
) -> tuple[list[SystemCurveView], dict[str, SystemRow]]:
    columns: dict[str, Any] = {
        name: getattr(SystemRow, name) for name in names if name not in _OF_GPUS and name != KV_CACHE
    }
    found = _stretches(session, SystemRow.node, SystemRow.time, columns, window, points)
    gpus: dict[str, list[tuple[float, str]]] = defaultdict(list)
    if not _OF_GPUS.keys().isdisjoint(names):
        part = select(SystemRow.node, SystemRow.time, SystemRow.gpus)
        part = part.where(*window, _spread(SystemRow.id, count, MAX_ROWS)).order_by(SystemRow.time, SystemRow.id)
        for node, time, text in session.execute(part):
            gpus[node].append((time, text))
    curves = []
    for name in names:
        if name in columns:
            curves += [_of_stretches(node, name, stretches) for node, stretches in sorted(found.items())]
        elif name in _OF_GPUS:
            curves += [
                _curve(node, name, [at for at, _ in rows], [_OF_GPUS[name](text) for _, text in rows], points)
                for node, rows in sorted(gpus.items())
            ]
    ends = {node: stretches[-1].end for node, stretches in found.items()}
    newest = select(SystemRow).where(*window, SystemRow.time.in_(set(ends.values()))).order_by(SystemRow.id)
    last = {row.node: row for row in session.scalars(newest) if row.time == ends.get(row.node)}
    return curves, last


@dataclass(frozen=True)
class _Stretch:
    """Samples of one machine or engine in a time bin: their number, first and last time, and extremes."""

    count: int
    begin: float
    end: float
    extremes: dict[str, tuple[float | None, float | None]]


def _stretches(
    session: Session,
    of: Any,
    time: Any,
    columns: Mapping[str, Any],
    window: Sequence[ColumnElement[bool]],
    points: int,
) -> dict[Any, list[_Stretch]]:
    """Return the time bins with samples, in order, by what they are `of`; each makes two points."""
    begin, end = session.execute(select(func.min(time), func.max(time)).where(*window)).one()
    if begin is None:
        return {}
    # PostgreSQL rounds and SQLite truncates, so the bins begin at different times, with one more bin on both.
    width = max((end - begin) / max(points // 2 - 1, 1), 1e-6)
    number = cast((time - begin) / width, Integer).label("number")
    extremes = [one for column in columns.values() for one in (func.min(column), func.max(column))]
    query = select(of, number, func.count(), func.min(time), func.max(time), *extremes).where(*window)
    found: dict[Any, list[_Stretch]] = defaultdict(list)
    for one, _, count, first, last, *values in session.execute(query.group_by(of, number).order_by(of, number)):
        pairs = dict(zip(columns, zip(values[::2], values[1::2], strict=True), strict=True))
        found[one].append(_Stretch(count, first, last, pairs))
    return found


def _of_stretches(of: str, name: str, stretches: Sequence[_Stretch]) -> SystemCurveView:
    """Build a curve with the smallest and the largest value of each bin, at its beginning and end."""
    x: list[float] = []
    values: list[float | None] = []
    for one in stretches:
        low, high = one.extremes[name]
        x.append(one.begin)
        values.append(low)
        if one.end > one.begin:
            x.append(one.end)
            values.append(high)
    return SystemCurveView(of=of, name=name, x=x, values=values, count=sum(one.count for one in stretches))


def _kv_curves(session: Session, run: Run, begin: float, end: float, points: int) -> list[SystemCurveView]:
    of = EngineSampleRow
    window = (of.run_id == run.id, of.time >= begin, of.time <= end)
    if (session.scalar(select(func.count()).where(*window)) or 0) > MAX_ROWS:
        found = _stretches(session, of.engine, of.time, {KV_CACHE: of.kv_cache}, window, points)
        return [_of_stretches(str(engine), KV_CACHE, stretches) for engine, stretches in sorted(found.items())]
    query = select(of.engine, of.time, of.kv_cache).where(*window)
    by_engine: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
    for engine, time, share in session.execute(query.order_by(of.time, of.id)):
        by_engine[engine].append((time, share))
    return [
        _curve(str(engine), KV_CACHE, [time for time, _ in rows], [share for _, share in rows], points)
        for engine, rows in sorted(by_engine.items())
    ]


def _curve(of: str, name: str, x: list[float], values: list[float | None], points: int) -> SystemCurveView:
    kept, shown = downsample(x, values, points)
    return SystemCurveView(of=of, name=name, x=kept, values=shown, count=len(x))


def _value(row: SystemRow, name: SystemName) -> float | None:
    value: float | None = _OF_GPUS[name](row.gpus) if name in _OF_GPUS else getattr(row, name)
    return value


def _gpu_mean(gpus: str) -> float | None:
    known = [busy for busy, _, _ in json.loads(gpus) if busy is not None]
    return math.fsum(known) / len(known) if known else None


def _gpu_memory(gpus: str) -> float | None:
    found = json.loads(gpus)
    return float(sum(used for _, used, _ in found)) if found else None


# Values from the text column with a row's GPUs; the other curves are columns of their own name.
_OF_GPUS: dict[str, Callable[[str], float | None]] = {"gpu": _gpu_mean, "gpu_memory_used": _gpu_memory}


def _now(row: SystemRow) -> NodeView:
    rows = sorted(json.loads(row.processes).items())
    processes = [ProcessView(name=name, cores=cores, memory=memory) for name, (cores, memory) in rows]
    gpus = len(json.loads(row.gpus))
    return NodeView(node=row.node, time=row.time, memory_total=row.memory_total, gpus=gpus, processes=processes)
