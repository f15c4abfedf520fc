"""What machines did (SystemSample): into its table, and out of it as curves."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Table, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.batch import Arrived, storable
from rhyme_openrlhf.api.bulk import BulkInsert
from rhyme_openrlhf.api.models import Run
from rhyme_openrlhf.api.record import EngineSampleRow, SystemRow
from rhyme_openrlhf.api.series import downsample
from rhyme_openrlhf.api.totals import finite
from rhyme_openrlhf.telemetry.events import SystemSample

_COLUMNS = (
    "run_id", "attempt_id", "time", "node", "cpu", "load", "memory_used", "memory_total", "disk_free", "shared_memory",
    "object_store", "gpus", "processes",
)  # fmt: skip
_TABLE: Table = SystemRow.__table__  # type: ignore[assignment]
_write = BulkInsert(_TABLE, _COLUMNS)

SystemName = Literal[
    "cpu", "load", "memory_used", "disk_free", "shared_memory", "object_store", "gpu", "gpu_memory_used", "kv_cache"
]
KV_CACHE = "kv_cache"


def write_system(connection: Connection, run_id: int, attempt_id: int, fresh: Iterable[Arrived]) -> None:
    """Write the system samples among the events."""
    _write(
        connection,
        [(run_id, attempt_id, one.time, *_row(event)) for one in fresh if isinstance(event := one.event, SystemSample)],
    )


def _row(event: SystemSample) -> tuple[Any, ...]:
    gpus = [
        [finite(busy), used, total]
        for busy, used, total in zip(event.gpu, event.gpu_memory_used, event.gpu_memory_total, strict=False)
    ]
    processes = {
        name: [finite(cores), event.process_memory.get(name, 0)]
        for name, cores in event.process_cpu.items()
        if storable(name)
    }
    return (
        event.node, finite(event.cpu), finite(event.load), event.memory_used, event.memory_total, event.disk_free,
        event.shared_memory, event.object_store, json.dumps(gpus), json.dumps(processes),
    )  # fmt: skip


@dataclass(frozen=True)
class SystemCurve:
    """`of`: a machine, or for the KV cache an engine's number. `x`: unix seconds. `count`: before down-sampling."""

    of: str
    name: str
    x: list[float]
    values: list[float | None]
    count: int


@dataclass(frozen=True)
class ProcessNow:
    """A process of the run: cores it uses, and resident bytes."""

    name: str
    cores: float | None
    memory: int


@dataclass(frozen=True)
class NodeNow:
    """A machine at its last sample (unix seconds)."""

    node: str
    time: float
    memory_total: int
    gpus: int
    processes: list[ProcessNow]


def system_curves(
    session: Session, run: Run, names: Sequence[SystemName], begin: float, end: float, points: int
) -> tuple[list[SystemCurve], list[NodeNow]]:
    """Curves of every machine (for `kv_cache` of every engine) between two moments, and each machine's last sample."""
    window = (SystemRow.run_id == run.id, SystemRow.time >= begin, SystemRow.time <= end)
    by_node: dict[str, list[SystemRow]] = defaultdict(list)
    for row in session.scalars(select(SystemRow).where(*window).order_by(SystemRow.time, SystemRow.id)):
        by_node[row.node].append(row)
    curves = [
        _curve(node, name, [row.time for row in rows], [_VALUES[name](row) for row in rows], points)
        for name in names
        if name != KV_CACHE
        for node, rows in sorted(by_node.items())
    ]
    if KV_CACHE in names:
        curves += _kv_curves(session, run, begin, end, points)
    return curves, [_now(rows[-1]) for _, rows in sorted(by_node.items())]


def _kv_curves(session: Session, run: Run, begin: float, end: float, points: int) -> list[SystemCurve]:
    of = EngineSampleRow
    query = select(of.engine, of.time, of.kv_cache).where(of.run_id == run.id, of.time >= begin, of.time <= end)
    by_engine: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
    for engine, time, share in session.execute(query.order_by(of.time, of.id)):
        by_engine[engine].append((time, share))
    return [
        _curve(str(engine), KV_CACHE, [time for time, _ in rows], [share for _, share in rows], points)
        for engine, rows in sorted(by_engine.items())
    ]


def _curve(of: str, name: str, x: list[float], values: list[float | None], points: int) -> SystemCurve:
    return SystemCurve(of, name, *downsample(x, values, points), count=len(x))


def _gpu_mean(row: SystemRow) -> float | None:
    known = [busy for busy, _, _ in json.loads(row.gpus) if busy is not None]
    return math.fsum(known) / len(known) if known else None


def _gpu_memory(row: SystemRow) -> float | None:
    gpus = json.loads(row.gpus)
    return float(sum(used for _, used, _ in gpus)) if gpus else None


_VALUES: dict[str, Callable[[SystemRow], float | None]] = {
    "cpu": lambda row: row.cpu,
    "load": lambda row: row.load,
    "memory_used": lambda row: row.memory_used,
    "disk_free": lambda row: row.disk_free,
    "shared_memory": lambda row: row.shared_memory,
    "object_store": lambda row: row.object_store,
    "gpu": _gpu_mean,
    "gpu_memory_used": _gpu_memory,
}


def _now(row: SystemRow) -> NodeNow:
    processes = [ProcessNow(name, cores, memory) for name, (cores, memory) in json.loads(row.processes).items()]
    processes.sort(key=lambda one: one.name)
    return NodeNow(row.node, row.time, row.memory_total, len(json.loads(row.gpus)), processes)
