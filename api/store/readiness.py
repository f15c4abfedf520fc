"""Whether the database is fit for this version: it has this version's schema, and it takes writes."""

from __future__ import annotations

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

# SQLite needs room for a batch of the largest size twice, in its file and in its write-ahead log.
ROOM_BYTES = 32 * 1024 * 1024
# A probe comes every few seconds, and from several machines: the store is not written to for each.
WRITE_SECONDS = 5.0
# Changes nothing, and is a write all the same.
_WRITE = text("UPDATE alembic_version SET version_num = version_num")
logger = logging.getLogger(__name__)


def schema_is_current(database: Database) -> bool:
    """Raises SQLAlchemyError when the database does not answer."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision() == head


class Writable:
    """Whether the store takes writes, tried at most every `WRITE_SECONDS`. Any thread may ask."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._problem = ""
        self._next = 0.0

    def problem(self) -> str:
        """Return what is wrong in one sentence, or ""."""
        # While one thread tries, the others have what was found last: a store that hangs takes one thread only.
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
            # A write-ahead log that has room takes small writes after its disk is full: to write says too little.
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
            logger.error("not ready: the database takes no writes", exc_info=error)
            return "the database takes no writes: the service's log says why"
        return ""
