"""Many rows in one statement: the fastest way that each database has, behind one call.

SQLite takes tuples one after the other in its own process. PostgreSQL takes rows that are new by COPY (binary: nothing
is written as text and read again), and rows that may conflict as one array a column, which costs it two to three times
as much: either way a batch of any size is one statement, parsed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import OperationalError

_POSTGRESQL = postgresql.dialect()


class BulkInsert:
    """An INSERT into some columns of a table, with an optional ON CONFLICT clause; made once, used by all threads."""

    def __init__(self, table: Table, columns: Sequence[str], conflict: str = "") -> None:
        """`columns` must hold everything that has no default in the database."""
        names = ", ".join(f'"{name}"' for name in columns)
        into = f'INSERT INTO "{table.name}" ({names})'
        self._new_row = f"{into} VALUES ({', '.join('?' * len(columns))})"
        self._row = f"{self._new_row} {conflict}"
        arrays = ", ".join(f"%s::{table.c[name].type.compile(_POSTGRESQL)}[]" for name in columns)
        # WHERE true: without it, the grammar takes ON CONFLICT for a join's condition.
        self._arrays = f"{into} SELECT * FROM unnest({arrays}) WHERE true {conflict}" if conflict else ""
        self._copy = f'COPY "{table.name}" ({names}) FROM STDIN (FORMAT binary)'
        self._types = [_type_name(table.c[name].type.compile(_POSTGRESQL)) for name in columns]

    def __call__(self, connection: Connection, rows: Iterable[Sequence[Any]]) -> None:
        """Insert the rows; no two of them may conflict with each other."""
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
        """Insert rows that conflict with none: what the caller knows of the table says so."""
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
        except psycopg.OperationalError as error:  # as SQLAlchemy reports it of every other statement
            raise OperationalError(self._copy, None, error) from error


def _type_name(declared: str) -> str:
    """A type's name as PostgreSQL's catalogue has it: without a length, FLOAT with its size."""
    name = declared.partition("(")[0].lower()
    return "float8" if name == "float" else name


def replace(keys: Sequence[str], columns: Sequence[str], guard: str = "") -> str:
    """ON CONFLICT clause: the new row's values take the place of the old one's, where `guard` (SQL) allows it."""
    values = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name not in keys)
    return f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {values}" + (f" WHERE {guard}" if guard else "")


def add(table: str, keys: Sequence[str], sums: Sequence[str], replaced: Sequence[str] = ()) -> str:
    """ON CONFLICT clause: `sums` are added to the old row's, `replaced` take their place."""
    values = [f'"{name}" = "{table}"."{name}" + excluded."{name}"' for name in sums]
    values += [f'"{name}" = excluded."{name}"' for name in replaced]
    return f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {', '.join(values)}"
