"""A run directory into the store: the same rows as a live report, after any earlier reports."""

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from rhyme_openrlhf.api.ingest.announce import Announcement, Sender, announce
from rhyme_openrlhf.api.ingest.imported_files import ImportingError
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.ingest.store_batch import ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Attempt, Run
from tests.stores import place_upgraded

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
    with pytest.raises(ImportingError, match="has fewer events than the store"):
        import_directory(database, folder, NOW)
    assert stored_rows(database, run) == before


def test_what_is_no_run_directory_is_refused_in_words(
    database: Database, make_run: Callable[..., Rows], tmp_path: Path
) -> None:
    with pytest.raises(ImportingError, match=r"config.json cannot be read: No such file"):
        import_directory(database, tmp_path, NOW)
    folder = directory_of(tmp_path / "run", make_run(seed=15)[:3])
    (folder / "events.jsonl").write_text('{"kind": "note"}\n')
    with pytest.raises(ImportingError, match="line 1 is not an event"):
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


def fresh_rows(folder: Path, stored_rows: Callable[..., Any], run: str, *directories: Path) -> Any:
    """What a store that knows nothing makes of these directories."""
    place_upgraded(folder / "fresh.db")
    store = Database(f"sqlite:///{folder}/fresh.db")
    for directory in directories:
        import_directory(store, directory, NOW)
    rows = stored_rows(store, run)
    store.dispose()
    return rows


def damage(database: Database, run: str, rows: Rows) -> str:
    """A new attempt of the run that does its steps again, by an operator's token, and a configuration of its own."""
    uid = next(_uids)
    announcement = Announcement(uid, run, "x", "/elsewhere", {"command": ["forged"], "settings": {"forged": True}})
    with database.writing() as session:
        announce(session, announcement, NOW, Sender(1000, None, operator=True))
    with database.writing() as session:
        ingest(session, uid, prepare(rows), NOW, sender=Sender(1000, None, operator=True))
    return uid


@pytest.mark.parametrize("forged", ["nothing", "a step", "everything"])
@pytest.mark.parametrize("stored", ["imported", "reported to an earlier version"])
def test_the_true_directory_restores_a_run(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any], tmp_path: Path, stored: str,
    forged: str,
) -> None:  # fmt: skip
    rows, run, attempt = make_run(seed=16), next(_uids), next(_uids)
    folder = directory_of(tmp_path / "run", rows, run_uid=run, attempt_uid=attempt)
    expected = fresh_rows(tmp_path, stored_rows, run, folder)
    if stored == "imported":
        import_directory(database, folder, NOW)
    else:
        report(database, folder, run, attempt, rows)
        with database.writing() as session:
            session.execute(update(Attempt).values(vouched=False))
    # Other figures, later times, other epochs and engines.
    other = make_run(seed=99, steps=(1, 2, 7), engines=2, end="")
    uid = damage(database, run, {"nothing": [], "a step": other[2:5], "everything": other}[forged])
    damaged = stored_rows(database, run)
    assert damaged["runs"] != expected["runs"]
    assert (damaged["steps"] == expected["steps"]) == (forged == "nothing")
    imported = import_directory(database, folder, NOW)
    assert (imported.accepted, imported.duplicates, imported.removed) == (0, len(rows), (uid,))
    assert stored_rows(database, run) == expected
    with database.reading() as session:
        assert session.execute(select(Run.status)).scalar_one() == "succeeded"
    assert import_directory(database, folder, NOW).removed == ()


def test_a_resumed_run_is_restored_with_all_its_attempts(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any], tmp_path: Path
) -> None:
    run = next(_uids)
    parts = [make_run(seed=17, end="stopped"), make_run(seed=18, steps=(3, 4, 5))]
    uids = [next(_uids) for _ in parts]
    folders = [
        directory_of(tmp_path / uid, rows, run_uid=run, attempt_uid=uid) for uid, rows in zip(uids, parts, strict=True)
    ]
    expected = fresh_rows(tmp_path, stored_rows, run, *folders)
    for uid, folder, rows in zip(uids, folders, parts, strict=True):
        report(database, folder, run, uid, rows)
    assert stored_rows(database, run) == expected
    # Attempts that the run's own token announced stay after the import of any directory.
    for folder in folders:
        assert import_directory(database, folder, NOW).removed == ()
        assert stored_rows(database, run)["steps"] == expected["steps"]
    forged = damage(database, run, make_run(seed=98, steps=(1,), end=""))
    assert import_directory(database, folders[1], NOW).removed == (forged,)
    assert stored_rows(database, run) == expected
    # An earlier version kept no note of who announced them: the directories in their order bring all back.
    with database.writing() as session:
        session.execute(update(Attempt).values(vouched=False))
    forged = damage(database, run, make_run(seed=97, steps=(2, 9), end=""))
    assert import_directory(database, folders[0], NOW).removed == (forged, uids[1])
    assert import_directory(database, folders[1], NOW).accepted == len(parts[1])
    assert stored_rows(database, run) == expected


def test_a_run_is_imported_while_it_reports(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any], tmp_path: Path
) -> None:
    """Its file grows and its reporter sends, while two imports of it go on all the time."""
    rows, run, attempt = make_run(seed=19, steps=range(1, 40)), next(_uids), next(_uids)
    folder = directory_of(tmp_path / "run", [], run_uid=run, attempt_uid=attempt)
    (folder / "events.jsonl").write_text("")
    ended = threading.Event()

    def import_again_and_again() -> int:
        times = 0
        while not ended.is_set():
            import_directory(database, folder, NOW)
            times += 1
        return times

    with ThreadPoolExecutor() as pool:
        # Announced first, so that what is heard of it decides about its end.
        report(database, folder, run, attempt, [])
        importing = [pool.submit(import_again_and_again) for _ in range(2)]
        try:
            for begin in range(0, len(rows), 20):
                part = rows[begin : begin + 20]
                with (folder / "events.jsonl").open("a") as file:
                    file.write("".join(json.dumps(row) + "\n" for row in part))
                report(database, folder, run, attempt, part)
        finally:
            ended.set()
        assert all(one.result() >= 1 for one in importing)
    expected = fresh_rows(tmp_path, stored_rows, run, folder)
    assert len(expected["events"]) == len(rows)
    assert stored_rows(database, run) == expected


def test_what_an_import_brought_in_is_not_dropped_again(
    database: Database, make_run: Callable[..., Rows], tmp_path: Path
) -> None:
    """Its reporter goes on telling how many events it has given up since the attempt began."""
    rows, run, attempt = make_run(seed=23, end=""), next(_uids), next(_uids)
    folder = directory_of(tmp_path / "run", rows, run_uid=run, attempt_uid=attempt)
    sent = [row for row in rows if row["source"] != "trainer" or row["sequence"] > 4]
    report(database, folder, run, attempt, sent, given_up={"trainer": 5})
    assert import_directory(database, folder, NOW).replaced
    for given_up, dropped in ((5, 0), (7, 2)):
        with database.writing() as session:
            ingest(session, attempt, [], NOW, given_up={"trainer": given_up})
        with database.reading() as session:
            assert session.execute(select(Run.dropped_events)).scalar_one() == dropped


def test_what_is_nested_too_deep_is_refused_in_words(
    database: Database, make_run: Callable[..., Rows], tmp_path: Path
) -> None:
    folder = directory_of(tmp_path / "run", make_run(seed=24)[:3])
    config, events = (folder / "config.json").read_text(), (folder / "events.jsonl").read_text()
    for levels in (900, 5000):
        deep = "[" * levels + "]" * levels
        (folder / "config.json").write_text(f'{{"settings": {deep}}}')
        with pytest.raises(ImportingError, match="cannot be imported"):
            import_directory(database, folder, NOW)
        (folder / "config.json").write_text(config)
        line = f'{{"kind": "odd", "time": 1, "source": "a", "sequence": 0, "x": {deep}}}\n'
        (folder / "events.jsonl").write_text(line)
        with pytest.raises(ImportingError, match=r"nested deeper than 32 levels|line 1 is not an event"):
            import_directory(database, folder, NOW)
        (folder / "events.jsonl").write_text(events)
