"""Export of whole tables as CSV, JSON or Parquet, row group by row group, so that no table is in memory as a whole.

Invariant: every group is read in a transaction of its own, so that a slow client holds no connection. The next group
continues after the key of the last row.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Select, select, tuple_

from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import EngineStepRow, Interval, Metric, Move, Step

Format = Literal["csv", "json", "parquet"]
RunTable = Literal["steps", "metrics", "intervals", "engine_steps", "moves"]
MEDIA_TYPES: dict[str, str] = {
    "csv": "text/csv",
    "json": "application/json",
    "parquet": "application/vnd.apache.parquet",
}
# Rows read at once: about 1 MB, and a useful row group.
GROUP = 10_000
_RUN_COLUMNS = (
    "uid", "name", "origin", "status", "message", "notes", "created_at", "started_at", "finished_at", "paused_seconds",
    "paused_at", "archived_at", "engines", "tensor_parallel_size", "epochs", "steps_total", "step", "epoch", "reward",
    "tokens_per_second", "speculation_rate", "bubble_fraction", "dropped_events", "last_event_at",
)  # fmt: skip
# Beginnings of a formula in spreadsheets (OWASP, "CSV injection"), also after quotes and spaces.
_FORMULA = re.compile(r'["\s]*[=+\-@＝＋－＠]|[\t\r\n]')
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")
_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string()}


@dataclass(frozen=True)
class Source:
    """A table to export: its shown columns, and the key columns for its order (unique together, never null)."""

    table: Any
    columns: tuple[str, ...]
    key: tuple[str, ...]
    run_id: int | None = None

    def types(self) -> list[type]:
        return [self.table.__table__.columns[name].type.python_type for name in self.columns]

    def groups(self, database: Database) -> Iterator[list[Sequence[Any]]]:
        """Yield rows of `columns`, at most GROUP at once."""
        last: tuple[Any, ...] | None = None
        while True:
            with database.reading() as session:
                rows = session.execute(self._query(last)).all()
            if rows:
                yield [row[: len(self.columns)] for row in rows]
                last = tuple(rows[-1][len(self.columns) :])
            if len(rows) < GROUP:
                return

    def _query(self, last: tuple[Any, ...] | None) -> Select[Any]:
        keys = [getattr(self.table, name) for name in self.key]
        query = select(*(getattr(self.table, name) for name in self.columns), *(key.label(None) for key in keys))
        if self.run_id is not None:
            query = query.where(self.table.run_id == self.run_id)
        if last is not None:
            query = query.where(tuple_(*keys) > tuple_(*last))
        return query.order_by(*keys).limit(GROUP)


def run_source(table: RunTable, run_id: int) -> Source:
    """Return the source of one table of one run."""
    tables: dict[RunTable, tuple[Any, tuple[str, ...]]] = {
        "steps": (Step, ("step",)),
        "metrics": (Metric, ("name", "step")),
        "intervals": (Interval, ("id",)),
        "engine_steps": (EngineStepRow, ("step", "engine")),
        "moves": (Move, ("id",)),
    }
    found, key = tables[table]
    inside = ("id", "run_id", "attempt_id")
    columns = tuple(column.name for column in found.__table__.columns if column.name not in inside)
    return Source(found, columns, key, run_id)


def runs_source() -> Source:
    """Return the source of the table of runs."""
    return Source(Run, _RUN_COLUMNS, ("id",))


def encode(source: Source, database: Database, form: Format) -> Iterator[bytes]:
    """Return the export in pieces."""
    groups = source.groups(database)
    if form == "csv":
        return _csv(source, groups)
    if form == "json":
        return _json(source, groups)
    return _parquet(source, groups)


def _csv(source: Source, groups: Iterator[list[Sequence[Any]]]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(source.columns)
    texts = {number for number, kind in enumerate(source.types()) if kind is str}
    for rows in groups:
        writer.writerows(
            [_no_formula(cell) if number in texts else cell for number, cell in enumerate(row)] for row in rows
        )
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def _no_formula(cell: str | None) -> str | None:
    """Return a text with an apostrophe in front if a spreadsheet would run it as a formula, else unchanged."""
    return f"'{cell}" if cell is not None and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell


def _json(source: Source, groups: Iterator[list[Sequence[Any]]]) -> Iterator[bytes]:
    yield b"["
    between = b"\n"
    for rows in groups:
        lines = [json.dumps(dict(zip(source.columns, row, strict=True)), allow_nan=False).encode() for row in rows]
        yield between + b",\n".join(lines)
        between = b",\n"
    yield b"\n]\n"


class _Pipe(io.RawIOBase):
    """A buffer for the Parquet writer, from which the output is taken piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._length

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._length += len(piece)
        return len(piece)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def _parquet(source: Source, groups: Iterator[list[Sequence[Any]]]) -> Iterator[bytes]:
    fields = [pa.field(name, _TYPES[kind]) for name, kind in zip(source.columns, source.types(), strict=True)]
    schema = pa.schema(fields)
    pipe = _Pipe()
    with pq.ParquetWriter(pipe, schema) as writer:
        for rows in groups:
            columns = [
                pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), fields, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            yield pipe.take()
    yield pipe.take()
