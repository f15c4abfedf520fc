"""The real reporter and a real service whose store loses what it had confirmed, or refuses one event for good."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn")

from rhyme_openrlhf.telemetry import batches, reporter
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import Note, RunFinished
from rhyme_openrlhf.telemetry.reporter import Reporter, read_report
from tests.telemetry.control_server import make_run, written

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0
SOURCES = ("driver", "trainer", "engine-0")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, starts_service: None) -> Iterator[Any]:
    """`rhyme serve` on SQLite."""
    spec = importlib.util.spec_from_file_location("reported_runs", ROOT / "scripts" / "reported_runs.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up there.
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("service")
    service = script.Service(folder / "data", folder / "log")
    yield service
    service.end()


@pytest.fixture
def report(service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Path, str]]]:
    """A run directory with its reporter in a thread, which waits for nothing long; `end` of it waits for its end."""
    monkeypatch.setattr(reporter, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(reporter, "BATCH_AGE_SECONDS", 0.02)
    monkeypatch.setattr(reporter, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(reporter, "SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(batches, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(batches, "LONGEST_PAUSE_SECONDS", 0.1)
    yield lambda: ReportedRun(tmp_path / "run", service)  # type: ignore[misc, return-value]


class ReportedRun:
    """A run directory, and its reporter in a thread of this process."""

    def __init__(self, path: Path, service: Any) -> None:
        self.uid = secrets.token_hex(8)
        self.path = make_run(path, service.url, run_uid=self.uid, attempt_uid=secrets.token_hex(8))
        self._ending = threading.Event()
        self.reporter = Reporter(read_report(path), service.token, self._ending)
        self._thread = threading.Thread(target=self.reporter.run, daemon=True)
        self._thread.start()

    def write(self, count: int, finish: bool = False) -> None:
        """Append notes of several sources."""
        with EventLog(self.path / "events.jsonl") as log:
            for number in range(count):
                log.write(Note("info", f"note {number}"), SOURCES[number % 3])
            if finish:
                log.write(RunFinished("succeeded", "", 1.0), "driver")

    def end(self) -> None:
        """End the run; its reporter sends the rest."""
        self._ending.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the reporter does not end"


def stored(service: Any, run: ReportedRun) -> list[tuple[str, int]]:
    """Which events the service has of a run."""
    return [(row["source"], row["sequence"]) for row in service.events(run.uid)]


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("lost", "then"),
    [
        ("the log of the last commits", "more events"),
        ("all since a backup", "only the end of the run"),
        ("the log of the last commits", "nothing more"),
    ],
)
def test_what_the_store_has_lost_is_sent_again(
    service: Any, report: Any, capsys: pytest.CaptureFixture[str], lost: str, then: str
) -> None:
    run = report()
    run.write(100)
    until(lambda: run.reporter.unsent() == "" and (run.path / "reporter.json").exists(), "the first events")
    until(lambda: len(stored(service, run)) == 100, "the first events to be stored")
    path = Path(service.log).parent / "data" / "rhyme.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as store:
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    run.write(200, finish=then == "nothing more")
    known = 300 + (then == "nothing more")
    until(lambda: len(stored(service, run)) == known, "all events to be stored")
    workers = psutil.Process(service.process.pid).children(recursive=True)
    service.kill()
    assert psutil.wait_procs(workers, DEADLINE_S)[1] == []
    if lost == "all since a backup":
        copy.replace(path)
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as store:
        query = "SELECT count(*) FROM events JOIN runs ON runs.id = events.run_id WHERE uid = ?"
        assert store.execute(query, (run.uid,)).fetchone()[0] < known, "nothing was lost: the test shows nothing"
    service.start()
    service.wait()
    if then == "more events":
        run.write(50)
    if then != "nothing more":
        run.write(0, finish=True)
    run.end()
    found = stored(service, run)
    assert len(found) == len(set(found))
    assert set(found) == set(written(run.path))
    shown = service.client.get(f"/runs/{run.uid}").json()
    assert (shown["status"], shown["dropped_events"]) == ("succeeded", 0)
    assert run.reporter.unsent() == ""
    assert "the server has lost events of" in capsys.readouterr().err


def test_events_that_are_refused_cost_nothing_else(service: Any, report: Any) -> None:
    """Nested too deep for the service, for a reader in Python, and for one in C; what follows each is stored."""
    run = report()
    levels = {7: 40, 20: 900, 33: 980, 34: 100_000}
    lines = []
    for number in range(60):
        nested = levels.get(number, 20)
        deep = "[" * nested + "]" * nested
        lines.append(f'{{"kind": "odd", "time": 1.0, "source": "driver", "sequence": {number}, "x": {deep}}}\n')
    with (run.path / "events.jsonl").open("a") as log:
        log.writelines(lines)
    run.end()
    assert stored(service, run) == [("driver", number) for number in range(60) if number not in levels]
    # A line that the reporter itself cannot read is one of nobody, and a gap.
    assert service.client.get(f"/runs/{run.uid}").json()["dropped_events"] == len(levels) + 1
