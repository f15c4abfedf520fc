"""Schema and sessions on both databases."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, func, insert, inspect, select, text, update
from sqlalchemy.exc import OperationalError

from rhyme_openrlhf.api.ingest.deletion import LARGE_TABLES, delete_run
from rhyme_openrlhf.api.store import database as database_module
from rhyme_openrlhf.api.store import models, record
from rhyme_openrlhf.api.store.base import Base
from rhyme_openrlhf.api.store.database import BusyError, Database, DatabaseError, alembic_config, upgrade
from rhyme_openrlhf.api.store.models import Attempt, Experiment, Run
from rhyme_openrlhf.api.store.record import EpochRow, Move, RawEvent, Step

# Of the last release: every schema from the first one to it is upgraded below. All until there is a release.
REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()]


def test_the_migrations_make_exactly_the_models(empty_url: str) -> None:
    assert models and record
    store = Database(empty_url)
    store.upgrade()
    with store.engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
        checks = {c["name"] for c in inspect(connection).get_check_constraints("runs")}
    assert differences == []
    assert checks == {"ck_runs_status"}
    store.dispose()


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_schema_is_upgraded_with_its_rows(empty_url: str, revision: str) -> None:
    store = Database(empty_url)
    with store._writing_engine.begin() as connection:
        upgrade(connection, revision)
        tables = MetaData()
        tables.reflect(connection)
        fill(connection, tables)
        before = {
            name: connection.execute(select(func.count()).select_from(t)).scalar_one()
            for name, t in tables.tables.items()
        }
    assert before["runs"] == before["events"] == 1
    store.upgrade()
    store.upgrade()
    with store.reading() as session:
        for name, rows in before.items():
            # Made again from the rows, which are too few for one here.
            # Stretches are in no later version than 0009.
            if name in ("curve_blocks", "curve_stretches"):
                continue
            assert session.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one() == rows, name
        run = session.execute(select(Run)).scalar_one()
        assert (run.name, run.config) == ("text", {"a": [1]})
    store.dispose()


def fill(connection, tables: MetaData) -> None:  # type: ignore[no-untyped-def]
    """Insert one row into every table, made of its columns' types in that version."""
    for table in tables.sorted_tables:
        if table.name == "alembic_version":
            continue
        values = {}
        for column in table.columns:
            kind = str(column.type).upper()
            if column.name == "parent_id":
                values[column.name] = None
            elif "JSON" in kind:
                values[column.name] = {"a": [1]}
            elif "CHAR" in kind or "TEXT" in kind:
                values[column.name] = {"role": "viewer", "status": "running"}.get(column.name, "text")
            elif "BLOB" in kind or "BYTEA" in kind:
                values[column.name] = b"bytes"
            elif "BOOL" in kind:
                values[column.name] = True
            else:
                values[column.name] = 1
        connection.execute(insert(table), values)


def test_a_newer_schema_is_refused(empty_url: str) -> None:
    store = Database(empty_url)
    store.upgrade()
    with store.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseError, match="schema '9999'.*newer version"):
        store.upgrade()
    store.dispose()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://h/x", "must be sqlite:///FILE or postgresql"),
        ("postgresql+psycopg2://h/x", "must be sqlite"),
        ("nonsense", "the database URL is not valid"),
        ("sqlite://", "must be a file"),
    ],
)
def test_other_urls_are_refused_in_words(url: str, says: str) -> None:
    with pytest.raises(DatabaseError, match=says):
        Database(url)


@pytest.mark.parametrize(("trusted", "lives"), [(0.0, True), (3600.0, False)])
def test_a_connection_that_died_is_replaced_unless_it_was_used_just_now(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, trusted: float, lives: bool
) -> None:
    monkeypatch.setattr(database_module, "_TRUSTED_SECONDS", trusted)
    store, other = Database(postgresql_url), Database(postgresql_url)
    for snapshot in (True, False):
        with store.reading(snapshot) as session:
            server = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with other.writing() as session:
            # With a time to wait: it returns when the process is gone.
            session.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": server})
        with nullcontext() if lives else pytest.raises(OperationalError), store.reading(snapshot) as session:
            assert session.execute(text("SELECT pg_backend_pid()")).scalar_one() != server
        # It is not met twice.
        with store.reading(snapshot) as session:
            session.execute(text("SELECT 1"))
    for one in (store, other):
        one.dispose()


def test_two_services_upgrade_at_once(empty_url: str) -> None:
    stores = [Database(empty_url) for _ in range(2)]
    with ThreadPoolExecutor() as services:
        for upgraded in [services.submit(store.upgrade) for store in stores]:
            upgraded.result(60)
    for store in stores:
        store.dispose()


def test_a_file_is_opened_for_the_first_time_by_several_at_once(tmp_path: Path) -> None:
    """SQLite does not wait by itself while another connection changes the kind of journal."""
    for number in range(20):
        stores = [Database(f"sqlite:///{tmp_path}/{number}.db") for _ in range(4)]
        together = threading.Barrier(len(stores))

        def open_one(store: Database, together: threading.Barrier = together) -> str:
            together.wait(60)
            with store.reading() as session:
                return str(session.execute(text("PRAGMA journal_mode")).scalar())

        with ThreadPoolExecutor() as services:
            assert [*services.map(open_one, stores)] == ["wal"] * len(stores)
        for store in stores:
            store.dispose()


def test_an_upgrade_that_cannot_begin_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.2)
    Database(f"sqlite:///{tmp_path}/a.db").upgrade()
    with sqlite3.connect(tmp_path / "a.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusyError, match=r"locked by another writer for 0\.2 s"):
            Database(f"sqlite:///{tmp_path}/a.db").upgrade()


def test_sqlite_is_set_up(tmp_path: Path) -> None:
    store = Database(f"sqlite:///{tmp_path}/a.db")
    with store.reading() as session:
        pragmas = [
            session.execute(text(f"PRAGMA {p}")).scalar() for p in ("journal_mode", "foreign_keys", "synchronous")
        ]
    assert pragmas == ["wal", 1, 1]
    store.dispose()


@pytest.mark.parametrize("there", [False, True])
def test_an_sqlite_store_is_its_users_alone(tmp_path: Path, there: bool) -> None:
    """Files are private for any umask, in a folder open to others, and if an earlier version left them open."""
    tmp_path.chmod(0o777)
    path = tmp_path / "a.db"
    before = os.umask(0)
    try:
        if there:
            with sqlite3.connect(path) as other:
                other.execute("PRAGMA journal_mode = WAL")
                other.execute("CREATE TABLE t (x)")
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
        store = Database(f"sqlite:///{path}")
        store.upgrade()
        found = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
        store.dispose()
        if there:
            other.close()
    finally:
        os.umask(before)
    assert found == dict.fromkeys(("a.db", "a.db-wal", "a.db-shm"), 0o600)


@pytest.mark.usefixtures("starts_python")
def test_making_a_store_private_keeps_its_locks(tmp_path: Path) -> None:
    """A file that is opened and closed by the process beside SQLite would lose all of them."""
    store = Database(f"sqlite:///{tmp_path}/a.db")
    store.upgrade()
    with store.writing() as session:
        session.add(Experiment(name="a", created_at=0.0))
        session.flush()
        # A connection of its own, which looks at the file's mode.
        with store.reading() as reading:
            reading.execute(text("SELECT 1"))
        program = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
        command = [sys.executable, "-c", program, f"{tmp_path}/a.db"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "database is locked" in done.stderr
    store.dispose()


@contextmanager
def upgraded(url: str, revision: str, **second: Any) -> Iterator[Database]:
    """Have a store that was filled as of this revision, with a second attempt that has these values, and upgraded."""
    store = Database(url)
    with store._writing_engine.begin() as connection:
        upgrade(connection, revision)
        tables = MetaData()
        tables.reflect(connection)
        fill(connection, tables)
        attempts = tables.tables["attempts"]
        row = dict(connection.execute(select(attempts)).mappings().one())
        another = {"id": 2, "number": 2, "uid": "other", "submission_id": None}
        connection.execute(insert(attempts), {**row, **another, **second})
    store.upgrade()
    try:
        yield store
    finally:
        store.dispose()


def test_an_upgrade_vouches_for_what_the_service_started(empty_url: str) -> None:
    with upgraded(empty_url, "0006") as store, store.reading() as session:
        found = session.execute(select(Attempt.number, Attempt.vouched).order_by(Attempt.number)).all()
        assert list(map(tuple, found)) == [(1, True), (2, False)]
        assert session.execute(select(Run.reporter_id)).scalar_one() is None


@pytest.mark.parametrize(("started", "paused_at"), [(None, 1.0), (5.0, None)])
def test_an_upgrade_knows_which_runs_wait_for_a_restart(
    empty_url: str, started: float | None, paused_at: float | None
) -> None:
    with upgraded(empty_url, "0019", started_at=started, finished_at=None) as store, store.reading() as session:
        assert session.execute(select(Run.paused_at)).scalar_one() == paused_at


def test_what_fails_is_rolled_back(database: Database) -> None:
    with pytest.raises(RuntimeError), database.writing() as session:
        session.add(Experiment(name="a", created_at=0.0))
        session.flush()
        raise RuntimeError
    with database.reading() as session:
        assert session.execute(select(func.count()).select_from(Experiment)).scalar_one() == 0


def test_a_reader_sees_one_snapshot_while_a_writer_commits(database: Database) -> None:
    count = select(func.count()).select_from(Experiment)
    with database.reading() as session:
        assert session.execute(count).scalar_one() == 0
        with database.writing() as writer:
            writer.add(Experiment(name="a", created_at=0.0))
        assert session.execute(count).scalar_one() == 0
    with database.reading() as session:
        assert session.execute(count).scalar_one() == 1


def test_a_writer_that_does_not_end_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.2)
    path = tmp_path / "a.db"
    store = Database(f"sqlite:///{path}")
    store.upgrade()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    begin = time.monotonic()
    with pytest.raises(BusyError, match="locked by another writer"), store.writing():
        pass
    assert time.monotonic() - begin < 5
    other.execute("ROLLBACK")
    with store.writing(), pytest.raises(BusyError, match="waited 0.2 s"), store.writing():
        pass
    other.close()
    store.dispose()


def test_a_deleted_run_takes_everything_along(database: Database) -> None:
    with database.writing() as session:
        connection = session.connection()
        tables = MetaData()
        tables.reflect(connection)
        fill(connection, tables)
    with database.writing() as session:
        session.execute(update(Run).values(status="succeeded"))
    delete_run(database, "text")
    with database.reading() as session:
        left = {name for name in tables.tables if session.execute(text(f'SELECT 1 FROM "{name}"')).first()}
        assert session.execute(select(Attempt)).first() is None
    stay = {"alembic_version", "audit", "dispatch_lease", "experiments", "saved_views", "sign_in_codes"}
    assert left == stay | {"webhook_deliveries", "webhooks"}


def test_deleting_a_run_knows_every_table_without_a_reference_to_it() -> None:
    loose = {
        table.name for table in Base.metadata.sorted_tables if "run_id" in table.c and not table.c.run_id.foreign_keys
    }
    assert loose == {table.__tablename__ for table in LARGE_TABLES}
    for name in loose:
        # So that it looks at no other run's rows.
        table = Base.metadata.tables[name]
        whole = [index for index in table.indexes if index.dialect_options["sqlite"]["where"] is None]
        first = {next(iter(index.columns)).name for index in [*whole, table.primary_key]}
        assert "run_id" in first, name


def test_the_number_of_a_deleted_event_is_not_used_again_after_an_upgrade(empty_url: str) -> None:
    store = Database(empty_url)
    with store._writing_engine.begin() as connection:
        upgrade(connection, "0001")
        tables = MetaData()
        tables.reflect(connection)
        fill(connection, tables)
        events = tables.tables["events"]
        values = {"run_id": 1, "attempt_id": 1, "source": "a", "time": 0.0, "kind": "b", "body": "{}"}
        connection.execute(text("DELETE FROM events"))
        if not store.is_sqlite:
            connection.execute(text("SELECT setval(pg_get_serial_sequence('events', 'id'), 1)"))
        connection.execute(insert(events), [{**values, "sequence": n} for n in range(3)])
        highest = connection.execute(select(func.max(events.c.id))).scalar_one()
        connection.execute(text("DELETE FROM events WHERE sequence > 0"))
    store.upgrade()
    with store.writing() as session:
        session.execute(insert(RawEvent), [{**values, "sequence": 3}])
        assert session.scalar(select(func.max(RawEvent.id))) == highest + 1
    store.dispose()


def test_an_upgrade_knows_sources_and_downtimes_of_runs_that_are_there(empty_url: str) -> None:
    store = Database(empty_url)
    counters = {"accepted": 9, "accepted_siblings": 2, "accepted_own": 3}
    bodies = [("engine_step", {"step": step, "engine": 0, "counters": counters}) for step in (1, 1, 2)]
    # An older attempt's, whose step another has done again.
    older = ("engine_step", {"step": 2, "engine": 0, "counters": counters})
    moved = {"step": 2, "sample": "s1", "downtime_seconds": 0.25, "predicted_seconds": None}
    with store._writing_engine.begin() as connection:
        upgrade(connection, "0004")
        tables = MetaData()
        tables.reflect(connection)
        of = tables.tables
        fill(connection, tables)
        for name in ("steps", "epochs", "moves", "events", "curve_blocks"):
            connection.execute(of[name].delete())
        zeros = {name: {c.name: 0 for c in of[name].columns if not c.nullable} for name in ("steps", "epochs", "moves")}
        for step in (1, 2):
            row = {**zeros["steps"], "run_id": 1, "attempt_id": 2, "step": step, "epoch": 1, "accepted": 9}
            connection.execute(insert(of["steps"]), row)
        connection.execute(insert(of["epochs"]), {**zeros["epochs"], "run_id": 1, "epoch": 1})
        move = {**zeros["moves"], "id": 1, "run_id": 1, "attempt_id": 2, "step": 2, "time": 5.5, "sample": "s1"}
        connection.execute(insert(of["moves"]), {**move, "cause": "c", "carrier": "c", "outcome": "o", "seconds": 0.5})
        event = {"run_id": 1, "attempt_id": 2, "source": "a", "time": 5.5}
        for number, (kind, body) in enumerate([*bodies, ("sample_moved", moved)]):
            values = {**event, "id": number + 2, "sequence": number, "kind": kind, "body": json.dumps(body)}
            connection.execute(insert(of["events"]), values)
        first = {**event, "id": 9, "attempt_id": 1, "sequence": 0, "kind": older[0], "body": json.dumps(older[1])}
        connection.execute(insert(of["events"]), first)
    store.upgrade()
    with store.reading() as session:
        rows = session.execute(select(Step.step, Step.accepted_siblings, Step.accepted_own).order_by(Step.step)).all()
        assert list(map(tuple, rows)) == [(1, 4, 6), (2, 2, 3)]
        assert session.execute(select(EpochRow.accepted_siblings, EpochRow.accepted_own)).one() == (6, 9)
        assert session.execute(select(Move.downtime_seconds, Move.predicted_seconds)).one() == (0.25, None)
    store.dispose()
