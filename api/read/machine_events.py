"""What a run's machines and caches did, read from its raw events: SystemSample, and the KV cache of EngineSample.

Invariant: no question reads more than about `MAX_ROWS` events (looks at `MAX_LOOKED`, for frequent kinds); of more,
every one has the same chance to be read, so that no machine is left out, and the same question gives the same ones.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import FREQUENT_KINDS, RawEvent, of_kinds

# Read and decoded in a quarter of a second, and the page asks for several figures; 12 points for each of 500 pixels.
MAX_ROWS = 6_000
# Of kinds that no index finds.
MAX_LOOKED = 40_000
# Two primes: ids times the first spread evenly over the remainders of the second.
_SPREAD, _PARTS = 7919, 104_729


class SystemRow(msgspec.Struct):
    """One SystemSample (telemetry/events.py says what its fields are); `time` in unix seconds."""

    node: str
    cpu: float
    memory_used: float
    memory_total: float
    load: float | None = None
    disk_free: float | None = None
    shared_memory: float | None = None
    object_store: float | None = None
    gpu: list[float] = []
    gpu_memory_used: list[float] = []
    gpu_memory_total: list[float] = []
    process_cpu: dict[str, float] = {}
    process_memory: dict[str, float] = {}
    time: float = 0.0


class CacheRow(msgspec.Struct):
    """Share of an engine's KV cache in use, 0 to 1; None from older writers."""

    engine: int
    kv_cache: float | None = None
    time: float = 0.0


def system_rows(session: Session, run: Run, since: float) -> list[SystemRow]:
    """Of all attempts, from unix time `since` on, in the order of time."""
    return _rows(session, run, "system_sample", since, msgspec.json.Decoder(SystemRow))


def cache_rows(session: Session, run: Run, since: float) -> list[CacheRow]:
    """Those that say how much of the cache is in use."""
    found = _rows(session, run, "engine_sample", since, msgspec.json.Decoder(CacheRow))
    return [row for row in found if row.kv_cache is not None]


def nodes_of(session: Session, run: Run) -> list[str]:
    """Machines among the newest samples, by name."""
    of = (RawEvent.run_id == run.id, *of_kinds(["system_sample"]))
    newest = session.scalars(select(RawEvent.body).where(*of).order_by(RawEvent.id.desc()).limit(MOST_NODES))
    return sorted({msgspec.json.decode(body, type=_Node).node for body in newest})


def spread(ids: InstrumentedAttribute[int], count: int, most: int) -> ColumnElement[bool]:
    """Return the condition that about `most` of `count` rows meet, the same ones each time, by their `ids`."""
    return (ids * _SPREAD) % _PARTS < _PARTS * most // count


class _Node(msgspec.Struct):
    node: str


# More machines than a choice can list.
MOST_NODES = 500


def _rows(session: Session, run: Run, kind: str, since: float, decoder: msgspec.json.Decoder[Any]) -> list[Any]:
    of: list[Any] = [RawEvent.run_id == run.id, *of_kinds([kind])]
    if kind in FREQUENT_KINDS:
        # No index knows how many there are: as many of the run's events are looked at, whatever their kinds.
        first, last = session.execute(
            select(func.min(RawEvent.id), func.max(RawEvent.id)).where(RawEvent.run_id == run.id)
        ).one()
        count, most = (last or 0) - (first or 0) + 1, MAX_LOOKED
    else:
        count, most = session.scalar(select(func.count()).where(*of)) or 0, MAX_ROWS
    if count > most:
        of.append(spread(RawEvent.id, count, most))
    query = select(RawEvent.time, RawEvent.body).where(*of, RawEvent.time >= since).order_by(RawEvent.id)
    found = []
    for time, body in session.execute(query):
        row = decoder.decode(body)
        row.time = time
        found.append(row)
    return sorted(found, key=lambda row: row.time)
