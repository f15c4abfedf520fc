"""SQL that is compiled once for all stores of a test process, instead of once for each test's store.

SQLAlchemy keeps compiled statements by engine and by dialect object. A test's service has an engine of its own, and
compiling its first statements took a third of the processor time of a small test.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any


def _same_class(self: object, other: object) -> bool:
    return type(self) is type(other)


def _class_hash(self: object) -> int:
    return hash(type(self))


@functools.cache
def share() -> None:
    """Let all engines of a kind find each other's compiled statements: our stores configure them alike."""
    from sqlalchemy import Connection, Engine, event
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
    from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

    for dialect in (SQLiteDialect_pysqlite, PGDialect_psycopg):
        # A dialect object is a part of each statement's key.
        dialect.__eq__ = _same_class  # type: ignore[method-assign]
        dialect.__hash__ = _class_hash  # type: ignore[method-assign]
        dialect._type_memos = weakref.WeakKeyDictionary()  # type: ignore[assignment]
    compiled: dict[Any, Any] = {}

    @event.listens_for(Engine, "engine_connect")
    def use(connection: Connection) -> None:
        connection.execution_options(compiled_cache=compiled)
