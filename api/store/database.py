"""The store: an SQLite file or a PostgreSQL database, its sessions, and the upgrade of its schema.

`sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql+psycopg://user@host/name`.

Invariants: a reading session never blocks a writer nor is blocked by one; on SQLite there is one writer at a time, who
takes the lock when the transaction begins and not in its middle; nobody waits longer than `BUSY_SECONDS` for it.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.pq import Format
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor, ExecutionContext
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from rhyme_openrlhf.api.store.curve_blocks import settle_all

DIALECTS = ("sqlite+pysqlite", "postgresql+psycopg")
# A batch is written in milliseconds; whoever waits longer is told to come back.
BUSY_SECONDS = 5.0
# A change of the journal takes a few milliseconds.
_RETRY_SECONDS = 0.01
# For the whole of PostgreSQL: two services that start at once upgrade one after the other.
_UPGRADE_LOCK = 0x72687970
# SQLite's cache of pages in a connection, in KiB: what the indexes of a large store need while it grows.
_SQLITE_CACHE_KIB = 65_536
# Connections that may be open at once: the threads in which the service handles requests.
_POOL_SIZE = 40
# A connection that has not been used for so long may have died with its server (restart), and is tried first. To try it
# each time would be a fourth of what a small page asks; who meets a dead one in this time is told to come again.
_TRUSTED_SECONDS = 1.0
# Of SQLite's files: they hold sessions, configurations and what tokens were.
_PRIVATE = 0o600
_BEGIN = "rhyme_begin"
_BINARY = "rhyme_binary"
# Execution options of a statement whose rows have bytes, which PostgreSQL writes as hexadecimal text otherwise. For
# those who take rows as the driver gives them.
AS_BINARY = {_BINARY: True}


class DatabaseError(Exception):
    """The database cannot be used; the message is one sentence for the user."""


class BusyError(DatabaseError):
    """Another writer has had the store for `BUSY_SECONDS`: try again later."""


class Database:
    """One store, shared by all threads of a process."""

    def __init__(self, url: str) -> None:
        """Raises DatabaseError for a URL that is none, or of another kind of database. Connects only when used."""
        try:
            parsed = make_url(url)
            dialect = f"{parsed.get_backend_name()}+{parsed.get_driver_name()}"
        except (ArgumentError, ValueError):
            # What is wrong with it is not repeated, nor chained: a URL may hold a password.
            raise DatabaseError(
                "the database URL is not one: it begins with sqlite:/// or postgresql+psycopg://"
            ) from None
        if dialect not in DIALECTS:
            raise DatabaseError(f"the database must be sqlite:///FILE or postgresql+psycopg://..., got {dialect}")
        if dialect.startswith("sqlite") and not parsed.database:
            raise DatabaseError("the database must be a file: sqlite:///FILE (each thread would see its own memory)")
        self.is_sqlite = dialect.startswith("sqlite")
        self.engine = _sqlite_engine(url) if self.is_sqlite else _postgresql_engine(url)
        self._writing_engine = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        # Threads of one process queue here instead of in SQLite, whose waiting sleeps and polls.
        self._writer = threading.Lock()

    @contextmanager
    def reading(self, snapshot: bool = True) -> Iterator[Session]:
        """A session on one snapshot; what it changes is rolled back at the end.

        Without `snapshot`, for a single question or those that need not fit together: on PostgreSQL each is its own
        transaction, which saves two ways to the server and back. It must change nothing.
        """
        with Session(self.engine, expire_on_commit=False) as session:
            if not self.is_sqlite:
                level = "REPEATABLE READ" if snapshot else "AUTOCOMMIT"
                session.connection(execution_options={"isolation_level": level})
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session whose changes are committed at the end, or rolled back when the block raises.

        Raises BusyError when another writer does not end. What must not be changed meanwhile is locked by the caller
        (`SELECT ... FOR UPDATE`); a run before its attempts.
        """
        with self._turn(), Session(self._writing_engine, expire_on_commit=False) as session, session.begin():
            session.connection()  # so that the lock is taken now
            yield session

    def upgrade(self) -> None:
        """Bring the schema to this version's. Raises DatabaseError when it is a newer one, BusyError as `writing`."""
        with self._turn(), self._writing_engine.begin() as connection:
            upgrade(connection)
            # Not in a migration: those stay as they are, and know no tables of later versions.
            with Session(connection) as session:
                settle_all(session)
                session.flush()

    def dispose(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The only writer of this process, on SQLite; raises BusyError when another process's does not end either."""
        if self.is_sqlite and not self._writer.acquire(timeout=BUSY_SECONDS):
            raise BusyError(f"waited {BUSY_SECONDS:g} s for another writer of the store")
        try:
            yield
        except OperationalError as error:
            if _is_busy(error):
                raise BusyError(f"the store is locked by another writer for {BUSY_SECONDS:g} s") from error
            raise
        finally:
            if self.is_sqlite:
                self._writer.release()


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Upgrade the schema inside the connection's transaction. Raises DatabaseError when it is newer than the code."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
    config = alembic_config()
    config.attributes["connection"] = connection
    current = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if current is not None and current not in known:
        raise DatabaseError(
            f"the database has schema {current!r}, which this version of rhyme-openrlhf does not know: "
            "install the newer version that made it, or name another database"
        )
    command.upgrade(config, revision)


def alembic_config() -> Config:
    """Alembic's settings: its scripts are in the package, installed or not."""
    config = Config()
    config.set_main_option("script_location", str(resources.files("rhyme_openrlhf") / "migrations").replace("%", "%%"))
    return config


def _sqlite_engine(url: str) -> Engine:
    engine = create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=0,
        connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS},
        # What runs and users wrote stays out of the log of errors.
        hide_parameters=True,
    )

    @event.listens_for(engine, "do_connect")
    def keep_private(dialect: Any, record: ConnectionPoolEntry, args: list[Any], keywords: dict[str, Any]) -> None:
        _make_private(args[0])

    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        # The driver's own idea of when a transaction begins is too late for reads: it is told by "begin" below.
        connection.isolation_level = None
        cursor = connection.cursor()
        _use_write_ahead_log(cursor)
        for pragma in (
            "foreign_keys = ON",
            # In WAL mode this keeps the file whole over a loss of power; the last moment's commits may be lost then,
            # and are not lost when a process is killed.
            "synchronous = NORMAL",
            f"busy_timeout = {int(BUSY_SECONDS * 1000)}",
            f"cache_size = -{_SQLITE_CACHE_KIB}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))

    return engine


def _make_private(file: str) -> None:
    """Make a database's file, which SQLite is to open, readable and writable for this user alone.

    SQLite gives its log and index (-wal, -shm) the mode of the file. The file is never opened here when it is there,
    because closing it would give up SQLite's locks.
    """
    path = os.path.realpath(file)
    # Where it cannot be made, SQLite says why.
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE))
    for name in (path, f"{path}-wal", f"{path}-shm"):
        # Another process may take the log away, when it is the last one.
        with suppress(FileNotFoundError):
            found = os.stat(name)
            # Another user's file is as that user wants it.
            if found.st_uid == os.geteuid() and found.st_mode & ~_PRIVATE & 0o777:
                os.chmod(name, _PRIVATE)


def _use_write_ahead_log(cursor: DBAPICursor) -> None:
    """For this file, for good. SQLite's own waiting leaves this out while another connection does the same."""
    limit = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > limit:
                raise
            time.sleep(_RETRY_SECONDS)


def _postgresql_engine(url: str) -> Engine:
    # Waiting for locks has a limit.
    connect_args: dict[str, Any] = {
        "connect_timeout": int(BUSY_SECONDS),
        "options": f"-c lock_timeout={int(BUSY_SECONDS * 1000)}",
    }
    engine = create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=0,
        # The one used last: its statements are prepared, and what it has read is in its process's caches.
        pool_use_lifo=True,
        connect_args=connect_args,
        hide_parameters=True,
    )

    @event.listens_for(engine, "before_cursor_execute")
    def choose_format(
        connection: Connection, cursor: Any, statement: str, values: Any, context: ExecutionContext | None, many: bool
    ) -> None:
        if context is not None and context.execution_options.get(_BINARY):
            cursor.format = Format.BINARY

    driver_error: type[Exception] = engine.dialect.loaded_dbapi.Error

    @event.listens_for(engine, "checkin")
    def note_use(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        record.info["used"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def replace_if_dead(connection: DBAPIConnection, record: ConnectionPoolEntry, proxy: PoolProxiedConnection) -> None:
        if time.monotonic() - record.info.get("used", -math.inf) < _TRUSTED_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except driver_error as error:
            raise InvalidatePoolError from error

    return engine


def _is_busy(error: OperationalError) -> bool:
    """SQLITE_BUSY; PostgreSQL's lock_not_available, deadlock_detected and serialization_failure."""
    if getattr(error.orig, "sqlstate", None) in ("55P03", "40P01", "40001"):
        return True
    return "database is locked" in str(error.orig)
