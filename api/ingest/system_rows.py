"""Writing samples of machines (SystemSample) into their table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Table

from rhyme_openrlhf.api.ingest.totals import finite
from rhyme_openrlhf.api.ingest.validation import Arrived
from rhyme_openrlhf.api.store.bulk import BulkInsert
from rhyme_openrlhf.api.store.json_values import storable
from rhyme_openrlhf.api.store.record import SystemRow
from rhyme_openrlhf.telemetry.events import SystemSample

_COLUMNS = (
    "run_id", "attempt_id", "time", "node", "cpu", "load", "memory_used", "memory_total", "disk_free", "shared_memory",
    "object_store", "gpus", "processes",
)  # fmt: skip
_TABLE: Table = SystemRow.__table__  # type: ignore[assignment]
_write = BulkInsert(_TABLE, _COLUMNS)


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
