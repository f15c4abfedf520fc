"""The database behind the store: SQLite or PostgreSQL, its sessions, and the upgrade of its schema.

URLs: `sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql+psycopg://user@host/name`.

Invariants:

- A reading session neither blocks a writer nor waits for one.
- SQLite has one writer at a time, which takes the lock at the beginning of its transaction.
- No session waits longer than `BUSY_SECONDS` for the lock.
"""

from __future__ import annotations

import functools
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.pq import Format
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor, ExecutionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidatePoolError, OperationalError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from rhyme_openrlhf.api.store.curve_blocks import settle_all
from rhyme_openrlhf.api.store.parameters import keep_all_parameters

DIALECTS = ("sqlite+pysqlite", "postgresql+psycopg")
# A batch is written in milliseconds; a client that waits longer has to retry.
BUSY_SECONDS = 5.0
# Letters of a driver's message in a sentence for people.
MOST_LETTERS = 300
# Changing the journal mode takes a few milliseconds.
_RETRY_SECONDS = 0.01
# One lock for the whole of PostgreSQL, so that two services that start at once upgrade one after the other.
_UPGRADE_LOCK = 0x72687970
# SQLite's page cache per connection, in KiB: room for the indexes of a large, growing store.
_SQLITE_CACHE_KIB = 65_536
# Most open connections: the threads in which the service handles requests.
_POOL_SIZE = 40
# A connection that was idle for this long is tested first, because its server may have restarted. Testing it each time
# would take a fourth of a small page's time. A client that gets a dead connection earlier has to retry.
_TRUSTED_SECONDS = 1.0
# Mode of SQLite's files, which contain sessions, configurations and digests of tokens.
_PRIVATE = 0o600
_BEGIN = "rhyme_begin"
_BINARY = "rhyme_binary"
# Execution options of a statement with binary columns, which PostgreSQL otherwise writes as hexadecimal text. Only for
# callers that take plain rows of the driver.
AS_BINARY = {_BINARY: True}


class DatabaseError(Exception):
    """The database cannot be used; the message is one sentence for the user."""


class BusyError(DatabaseError):
    """Another writer has held the store for `BUSY_SECONDS`: try again later."""


class Database:
    """A store, shared by all threads of a process."""

    def __init__(self, url: str) -> None:
        """Configure the engine; it connects only when used. Raises DatabaseError for an invalid or unsupported URL."""
        try:
            parsed = make_url(url)
            dialect = f"{parsed.get_backend_name()}+{parsed.get_driver_name()}"
        except (ArgumentError, ValueError):
            # The error neither repeats the URL nor chains the cause, because the URL may contain a password.
            raise DatabaseError(
                "the database URL is not valid: it must begin with sqlite:/// or postgresql+psycopg://"
            ) from None
        if dialect not in DIALECTS:
            raise DatabaseError(f"the database must be sqlite:///FILE or postgresql+psycopg://..., got {dialect}")
        if dialect.startswith("sqlite") and not parsed.database:
            raise DatabaseError(
                "the database must be a file: use sqlite:///FILE, because each thread would get its own memory"
            )
        self.is_sqlite = dialect.startswith("sqlite")
        self.engine = _sqlite_engine(url) if self.is_sqlite else _postgresql_engine(url)
        self._writing_engine = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        # Threads of one process queue here, because SQLite's own waiting sleeps and polls.
        self._writer = threading.Lock()

    @contextmanager
    def reading(self, snapshot: bool = True) -> Iterator[Session]:
        """Provide a session on one snapshot; its changes are rolled back at the end.

        Use `snapshot=False` for a single query, or for several that need not be consistent. On PostgreSQL, each query
        is then a transaction of its own, which saves two round trips. Such a session must change nothing.
        """
        with Session(self.engine, expire_on_commit=False) as session:
            if not self.is_sqlite:
                level = "REPEATABLE READ" if snapshot else "AUTOCOMMIT"
                session.connection(execution_options={"isolation_level": level})
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Provide a session whose changes are committed at the end, or rolled back if the block raises.

        Raises BusyError if another writer does not finish. The caller locks rows that must not change meanwhile
        (`SELECT ... FOR UPDATE`): a run before its attempts.
        """
        with self._turn(), Session(self._writing_engine, expire_on_commit=False) as session, session.begin():
            session.connection()  # takes the lock now
            yield session

    def upgrade(self) -> None:
        """Upgrade the schema to this version. Raises DatabaseError if it is newer, BusyError as `writing`."""
        with self._turn(), self._writing_engine.begin() as connection:
            upgrade(connection)
            # Not in a migration, because migrations never change and know no tables of later versions.
            with Session(connection) as session:
                settle_all(session)
                keep_all_parameters(session)
                session.flush()

    def open(self) -> None:
        """Create what is missing and upgrade the schema. Raises DatabaseError, also for faults of the database."""
        try:
            if self.is_sqlite:
                # The store contains sessions and configurations, so a new folder is readable for its owner only. In an
                # existing folder, only the files are private (`_make_private`).
                folder = Path(self.engine.url.database or "").absolute().parent
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.upgrade()
        # UnicodeError: a host that no name server can be asked for.
        except (DBAPIError, OSError, UnicodeError) as error:
            # Parameters may hold a password, too.
            shown = self.engine.url.set(query={}).render_as_string(hide_password=True)
            cause = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise DatabaseError(f"the database {shown} cannot be used: {cause[:MOST_LETTERS]}") from error

    def dispose(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock of this process's only writer on SQLite; raise BusyError if another writer keeps the store."""
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
    """Upgrade the schema inside the connection's transaction. Raises DatabaseError if it is newer than the code."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
    current = MigrationContext.configure(connection).get_current_revision()
    head, known = _revisions()
    if revision == "head" and current == head:
        return
    if current is not None and current not in known:
        raise DatabaseError(
            f"the database has schema {current!r}, which this version of rhyme-openrlhf does not know: "
            "install the newer version that created it, or use another database"
        )
    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


@functools.cache
def _revisions() -> tuple[str | None, frozenset[str]]:
    """Return the newest schema and all schemas that this version knows. Cached, because Alembic loads each script."""
    scripts = ScriptDirectory.from_config(alembic_config())
    return scripts.get_current_head(), frozenset(script.revision for script in scripts.walk_revisions())


def alembic_config() -> Config:
    """Return Alembic's configuration; its scripts are in the package, installed or not."""
    config = Config()
    config.set_main_option("script_location", str(resources.files("rhyme_openrlhf") / "migrations").replace("%", "%%"))
    return config


def _sqlite_engine(url: str) -> Engine:
    engine = create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=0,
        connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS},
        # Keeps data of runs and users out of the log of errors.
        hide_parameters=True,
    )

    @event.listens_for(engine, "do_connect")
    def keep_private(dialect: Any, record: ConnectionPoolEntry, args: list[Any], keywords: dict[str, Any]) -> None:
        _make_private(args[0])

    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        # The driver would begin a transaction too late for reads; the "begin" listener below does it.
        connection.isolation_level = None
        cursor = connection.cursor()
        _use_write_ahead_log(cursor)
        for pragma in (
            "foreign_keys = ON",
            # In WAL mode, this keeps the file consistent after a power failure. The last commits may then be lost, but
            # not when a process is killed.
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
    """Make the file of a database, which SQLite will open, readable and writable for this user only.

    SQLite gives its log and index (-wal, -shm) the mode of the file. An existing file is never opened here, because
    closing it would release SQLite's locks.
    """
    path = os.path.realpath(file)
    # If the file cannot be created, SQLite reports the reason.
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE))
    for name in (path, f"{path}-wal", f"{path}-shm"):
        # Another process may delete the log when it is the last user.
        with suppress(FileNotFoundError):
            found = os.stat(name)
            # Another user's file keeps its mode.
            if found.st_uid == os.geteuid() and found.st_mode & ~_PRIVATE & 0o777:
                os.chmod(name, _PRIVATE)


def _use_write_ahead_log(cursor: DBAPICursor) -> None:
    """Switch this file to write-ahead logging permanently.

    SQLite's own waiting does not apply while another connection does the same, so this retries.
    """
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
        # Reuse the last connection: its statements are prepared, and its process's caches are warm.
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
    """Return True for SQLITE_BUSY, and PostgreSQL's lock_not_available, deadlock_detected, serialization_failure."""
    if getattr(error.orig, "sqlstate", None) in ("55P03", "40P01", "40001"):
        return True
    return "database is locked" in str(error.orig)
