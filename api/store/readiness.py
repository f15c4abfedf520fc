"""Readiness of the database: it has this version's schema, and it accepts writes."""

from __future__ import annotations

import functools
import logging
import shutil
import threading
import time
from pathlib import Path

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from rhyme_openrlhf.api.store.database import BusyError, Database, alembic_config

# SQLite needs room for the largest batch twice: in its file and in its write-ahead log.
ROOM_BYTES = 32 * 1024 * 1024
# Probes come every few seconds from several machines, so not every probe writes to the store.
WRITE_SECONDS = 5.0
# A write that changes nothing.
_WRITE = text("UPDATE alembic_version SET version_num = version_num")
logger = logging.getLogger(__name__)


def schema_is_current(database: Database) -> bool:
    """Return True if the schema is this version's. Raises SQLAlchemyError if the database does not respond."""
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision() == _newest_revision()


@functools.cache
def _newest_revision() -> str | None:
    """Return the newest migration. Cached, because alembic compiles all of them, and anybody may send probes."""
    return ScriptDirectory.from_config(alembic_config()).get_current_head()


class Writable:
    """A check that the store accepts writes, made at most every `WRITE_SECONDS`; thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._problem = ""
        self._next = 0.0

    def problem(self) -> str:
        """Return the problem in one sentence, or ""."""
        # While one thread checks, others get the last result, so that a store that hangs blocks one thread only.
        if time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                self._problem = self._try()
                self._next = time.monotonic() + WRITE_SECONDS
            finally:
                self._lock.release()
        return self._problem

    def _try(self) -> str:
        if self._database.is_sqlite:
            folder = Path(self._database.engine.url.database or "").absolute().parent
            # A write-ahead log with spare room accepts small writes after its disk is full, so a write alone proves too
            # little.
            try:
                free = shutil.disk_usage(folder).free
            except OSError as error:
                return f"the database's folder cannot be read: {error.strerror}"
            if free < ROOM_BYTES:
                return f"the database's disk has {free // 2**20} MB left and needs {ROOM_BYTES // 2**20} MB: make room"
        try:
            with self._database.writing() as session:
                session.execute(_WRITE)
        except (BusyError, SQLAlchemyError) as error:
            logger.error("not ready: the database accepts no writes", exc_info=error)
            return "the database accepts no writes: see the service's log"
        return ""
