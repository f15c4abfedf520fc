"""A run directory into the store: the same rows as a live report, whatever arrived before."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from rhyme_openrlhf.api.announce import Announcement, announce
from rhyme_openrlhf.api.batch import prepare
from rhyme_openrlhf.api.database import Database
from rhyme_openrlhf.api.importer import ImportingError, import_directory
from rhyme_openrlhf.api.ingest import ingest
from rhyme_openrlhf.api.models import Run

Rows = list[dict[str, Any]]
NOW = 1_800_000_000.0
_uids = (f"{number:016x}" for number in itertools.count(1))


def directory_of(folder: Path, rows: Rows, **control: str) -> Path:
    """A run directory with these events."""
    folder.mkdir()
    config = {"command": ["rhyme"], "settings": {"run": {"name": "made up"}, "control": control}, "versions": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "torn')
    return folder


def report(database: Database, folder: Path, run_uid: str, attempt_uid: str, rows: Rows, **keywords: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    with database.writing() as session:
        announce(session, Announcement(attempt_uid, run_uid, "made up", str(folder), config), NOW)
    arrived = prepare(rows)
    with database.writing() as session:
        ingest(session, attempt_uid, arrived, NOW, **keywords)


@pytest.mark.parametrize("before", ["nothing", "half", "gaps", "tail given up", "all"])
def test_the_same_rows_as_a_live_report(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any], tmp_path: Path, before: str
) -> None:
    rows = make_run(seed=11)
    live, run, attempt = next(_uids), next(_uids), next(_uids)
    folder = directory_of(tmp_path / "run", rows, run_uid=run, attempt_uid=attempt)
    report(database, folder, live, next(_uids), rows)
    if before != "nothing":
        arrived, given_up = {
            "half": (rows[: len(rows) // 2], {}),
            "gaps": ([row for i, row in enumerate(rows) if i % 7], {}),
            "tail given up": (rows[:-1], {"driver": 1}),
            "all": (rows, {}),
        }[before]
        report(database, folder, run, attempt, arrived, given_up=given_up)
    imported = import_directory(database, folder, NOW)
    assert (imported.run_uid, imported.attempt_uid) == (run, attempt)
    assert imported.replaced == (before in ("gaps", "tail given up"))
    assert stored_rows(database, run) == stored_rows(database, live)
    again = import_directory(database, folder, NOW + 1)
    assert (again.accepted, again.duplicates, again.replaced) == (0, len(rows), False)
    assert stored_rows(database, run) == stored_rows(database, live)


def test_a_directory_that_was_never_reported_is_known_by_its_content(
    database: Database, make_run: Callable[..., Rows], tmp_path: Path
) -> None:
    rows = make_run(seed=12, end="")
    first = import_directory(database, directory_of(tmp_path / "a", rows), NOW)
    assert import_directory(database, directory_of(tmp_path / "copied", rows), NOW).run_uid == first.run_uid
    with database.reading() as session:
        run = session.execute(select(Run)).scalar_one()
        assert (run.origin, run.name, run.status) == ("imported", "made up", "lost")
        assert run.attempts[0].heartbeat_at is None
    # Its end came later: a run that was imported while it ran.
    ended = {**rows[0], "kind": "run_finished", "status": "succeeded", "message": "", "seconds": 1.0, "sequence": 2}
    directory_of(tmp_path / "ended", [*rows, ended])
    assert import_directory(database, tmp_path / "ended", NOW).accepted == 1
    with database.reading() as session:
        assert session.execute(select(Run.status)).scalar_one() == "succeeded"


def test_gaps_of_the_file_itself_stay_gaps(database: Database, make_run: Callable[..., Rows], tmp_path: Path) -> None:
    rows = make_run(seed=13)
    folder = directory_of(tmp_path / "run", rows[:4] + rows[6:])
    import_directory(database, folder, NOW)
    again = import_directory(database, folder, NOW)
    assert (again.accepted, again.replaced) == (0, False)
    with database.reading() as session:
        assert session.execute(select(Run.dropped_events)).scalar_one() == 2


def test_a_directory_that_holds_less_is_refused(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any], tmp_path: Path
) -> None:
    rows = make_run(seed=14)
    run, attempt = next(_uids), next(_uids)
    folder = directory_of(tmp_path / "run", rows[:10], run_uid=run, attempt_uid=attempt)
    report(database, folder, run, attempt, rows)
    before = stored_rows(database, run)
    with pytest.raises(ImportingError, match="holds less than is stored"):
        import_directory(database, folder, NOW)
    assert stored_rows(database, run) == before


def test_what_is_no_run_directory_is_refused_in_words(
    database: Database, make_run: Callable[..., Rows], tmp_path: Path
) -> None:
    with pytest.raises(ImportingError, match=r"config.json cannot be read: No such file"):
        import_directory(database, tmp_path, NOW)
    folder = directory_of(tmp_path / "run", make_run(seed=15)[:3])
    (folder / "events.jsonl").write_text('{"kind": "note"}\n')
    with pytest.raises(ImportingError, match="line 1 is no event"):
        import_directory(database, folder, NOW)
    (folder / "events.jsonl").write_text('{"kind": "note", "time": 1, "source": "a", "sequence": 0}\n')
    with pytest.raises(ImportingError, match="event 0 of the batch: .*'level'.*is missing"):
        import_directory(database, folder, NOW)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ImportingError, match="is not a JSON object"):
        import_directory(database, folder, NOW)
    (folder / "config.json").write_text("{")
    with pytest.raises(ImportingError, match="cannot be imported"):
        import_directory(database, folder, NOW)
