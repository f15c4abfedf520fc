"""Bulk inserts: many rows in one statement, by the fastest method of each database.

SQLite takes tuples one after the other, in this process. PostgreSQL takes new rows by COPY in binary form, without
conversion to text. Rows that may conflict go as one array per column, which costs PostgreSQL two to three times as
much. In both cases, a batch of any size is one statement, parsed once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DataError, OperationalError

_POSTGRESQL = postgresql.dialect()


class BulkInsert:
    """An INSERT into some columns of a table, with an optional ON CONFLICT clause; created once and thread-safe."""

    def __init__(self, table: Table, columns: Sequence[str], conflict: str = "") -> None:
        """Prepare the statements; `columns` must include all columns without a default in the database."""
        names = ", ".join(f'"{name}"' for name in columns)
        into = f'INSERT INTO "{table.name}" ({names})'
        self._new_row = f"{into} VALUES ({', '.join('?' * len(columns))})"
        self._row = f"{self._new_row} {conflict}"
        arrays = ", ".join(f"%s::{table.c[name].type.compile(_POSTGRESQL)}[]" for name in columns)
        # Without WHERE true, the grammar takes ON CONFLICT for a join's condition.
        self._arrays = f"{into} SELECT * FROM unnest({arrays}) WHERE true {conflict}" if conflict else ""
        self._copy = f'COPY "{table.name}" ({names}) FROM STDIN (FORMAT binary)'
        self._types = [_type_name(table.c[name].type.compile(_POSTGRESQL)) for name in columns]

    def __call__(self, connection: Connection, rows: Iterable[Sequence[Any]]) -> None:
        """Insert the rows, no two of which may conflict with each other."""
        rows = rows if isinstance(rows, list) else list(rows)
        if not rows:
            return
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql(self._row, [tuple(row) for row in rows])
        elif self._arrays:
            connection.exec_driver_sql(self._arrays, tuple(map(list, zip(*rows, strict=True))))
        else:
            self.new(connection, rows)

    def new(self, connection: Connection, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows that conflict with no stored row, as the caller knows."""
        if not rows:
            return
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql(self._new_row, [tuple(row) for row in rows])
            return
        driver: Any = connection.connection.driver_connection
        try:
            with driver.cursor() as cursor, cursor.copy(self._copy) as copy:
                copy.set_types(self._types)
                for row in rows:
                    copy.write_row(row)
        # Raised as SQLAlchemy does for every other statement.
        except psycopg.OperationalError as error:
            raise OperationalError(self._copy, None, error) from error
        # The driver itself refuses some numbers that no column has room for.
        except (psycopg.DataError, OverflowError, struct.error) as error:
            raise DataError(self._copy, None, error) from error


def _type_name(declared: str) -> str:
    """Return a type's name as in PostgreSQL's catalogue: without a length, and FLOAT with its size."""
    name = declared.partition("(")[0].lower()
    return "float8" if name == "float" else name


def replace(keys: Sequence[str], columns: Sequence[str], guard: str = "") -> str:
    """Return the ON CONFLICT clause that replaces the old row's values if `guard` (SQL) allows it."""
    values = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name not in keys)
    return f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {values}" + (f" WHERE {guard}" if guard else "")


def add(table: str, keys: Sequence[str], sums: Sequence[str], replaced: Sequence[str] = ()) -> str:
    """Return the ON CONFLICT clause that adds `sums` to the old row's values and replaces `replaced`."""
    values = [f'"{name}" = "{table}"."{name}" + excluded."{name}"' for name in sums]
    values += [f'"{name}" = excluded."{name}"' for name in replaced]
    return f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {', '.join(values)}"
