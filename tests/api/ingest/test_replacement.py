"""Events that an import replaces: in pieces, alone at it, and complete after a kill at any piece."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest import imported_files, replacement
from rhyme_openrlhf.api.ingest.imported_files import ImportingError
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.ingest.store_batch import BROKEN_OFF_SECONDS, ReplacingError, ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Attempt
from rhyme_openrlhf.api.store.record import EngineSampleRow, Interval, Metric, RawEvent
from tests.api.ingest.test_importer import NOW, directory_of, report

Rows = list[dict[str, Any]]
PIECE = 25
GROWN = (RawEvent, Interval, EngineSampleRow, Metric)
_uids = (f"{number:016x}" for number in itertools.count(2**40))


class Killed(BaseException):
    """The process of the import is gone: it makes no later transaction."""


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "CHUNK", PIECE)
    monkeypatch.setattr(imported_files, "CHUNK", PIECE)


@pytest.fixture
def with_gaps(database: Database, make_run: Callable[..., Rows], tmp_path: Path) -> tuple[Path, str, str, Rows]:
    """A run directory, of whose events the store lacks some."""
    rows, run, attempt = make_run(seed=31, steps=range(1, 6)), next(_uids), next(_uids)
    folder = directory_of(tmp_path / "run", rows, run_uid=run, attempt_uid=attempt)
    report(database, folder, run, attempt, [row for i, row in enumerate(rows) if i % 7])
    return folder, run, attempt, rows


def expected_rows(database: Database, folder: Path, rows: Rows, stored_rows: Callable[..., Any]) -> Any:
    live = next(_uids)
    report(database, folder, live, next(_uids), rows)
    return stored_rows(database, live)


def watched(database: Database, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Call `before` with the number of each writing transaction."""
    writing, numbers = database.writing, itertools.count()

    @contextmanager
    def counted() -> Iterator[Session]:
        before(next(numbers))
        with writing() as session:
            yield session

    monkeypatch.setattr(database, "writing", counted)


def test_no_transaction_grows_with_the_run(
    database: Database, with_gaps: Any, pieces: None, stored_rows: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run, _, rows = with_gaps
    expected = expected_rows(database, folder, rows, stored_rows)
    counts: list[list[int]] = []

    def count(number: int) -> None:
        with database.reading() as session:
            counts.append([session.scalars(select(func.count()).select_from(table)).one() for table in GROWN])

    with monkeypatch.context() as patched:
        watched(database, patched, count)
        assert import_directory(database, folder, NOW).replaced
    assert len(counts) > 2 * len(rows) // PIECE
    for earlier, later in itertools.pairwise(counts):
        assert all(abs(one - other) <= PIECE for one, other in zip(earlier, later, strict=True))
    assert stored_rows(database, run) == expected


@pytest.mark.parametrize("again", ["import", "reporter"])
def test_what_a_killed_import_leaves_is_completed(
    database: Database, with_gaps: Any, pieces: None, stored_rows: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    again: str,
) -> None:  # fmt: skip
    folder, run, attempt, rows = with_gaps
    expected = expected_rows(database, folder, rows, stored_rows)
    for killed_at in itertools.count(1):

        def kill(number: int, at: int = killed_at) -> None:
            if number >= at:
                raise Killed

        with monkeypatch.context() as patched:
            watched(database, patched, kill)
            try:
                import_directory(database, folder, NOW)
                break
            except Killed:
                pass
        with database.reading() as session:
            mark = session.scalars(select(Attempt.replacing_at).where(Attempt.uid == attempt)).one()
        if mark is not None:
            with pytest.raises(ImportingError, match="another import of this directory is under way"):
                import_directory(database, folder, NOW)
        # A minute later.
        with database.writing() as session:
            aged = update(Attempt).where(Attempt.uid == attempt, Attempt.replacing_at.is_not(None))
            session.execute(aged.values(replacing_at=Attempt.replacing_at - BROKEN_OFF_SECONDS - 1))
        if again == "import":
            import_directory(database, folder, NOW)
        else:
            known = {row["source"]: row["sequence"] + 1 for row in rows}
            for _ in range(2):  # as reporters do: from where the store says
                with database.writing() as session:
                    receipt = ingest(session, attempt, prepare(rows), time.time(), known=known)
                known = receipt.following
        if mark is not None or again == "import":
            assert stored_rows(database, run) == expected, killed_at
        # Gaps again, for the next one.
        with database.writing() as session:
            session.execute(update(Attempt).where(Attempt.uid == attempt).values(replacing_at=replacement.BROKEN_OFF))
        report(database, folder, run, attempt, [row for i, row in enumerate(rows) if i % 7])
    assert killed_at > 2 * len(rows) // PIECE
    assert stored_rows(database, run) == expected


def test_nobody_else_stores_events_meanwhile(
    database: Database, with_gaps: Any, pieces: None, stored_rows: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a sender that does not say what it knows."""
    folder, run, attempt, rows = with_gaps
    expected = expected_rows(database, folder, rows, stored_rows)
    writing = database.writing

    def send(number: int) -> None:
        if 1 <= number < 2 * len(rows) // PIECE:
            with pytest.raises(ReplacingError), writing() as session:
                ingest(session, attempt, prepare(rows[-3:]), time.time())

    with monkeypatch.context() as patched:
        watched(database, patched, send)
        assert import_directory(database, folder, NOW).replaced
    with database.writing() as session:
        assert ingest(session, attempt, prepare(rows[-3:]), NOW).accepted == 0
    assert stored_rows(database, run) == expected


def test_an_event_that_is_refused_deletes_nothing(
    database: Database, with_gaps: Any, pieces: None, stored_rows: Callable[..., Any]
) -> None:
    folder, run, _, rows = with_gaps
    before = stored_rows(database, run)
    wrong = {**rows[-1], "sequence": rows[-1]["sequence"] + 1, "time": "late"}
    text = "".join(json.dumps(row) + "\n" for row in [*rows, wrong])
    (folder / "events.jsonl").write_text(text)
    with pytest.raises(ImportingError, match="cannot be imported: event"):
        import_directory(database, folder, NOW)
    assert stored_rows(database, run) == before
