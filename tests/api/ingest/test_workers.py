"""Batches through worker processes: stored or refused as in threads, and a worker's death costs nobody an event."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from sqlalchemy import func, select

from rhyme_openrlhf.api.ingest.announce import Announcement, ForeignRunError, Sender, announce
from rhyme_openrlhf.api.ingest.decoding import BatchError
from rhyme_openrlhf.api.ingest.store_batch import UnknownAttemptError
from rhyme_openrlhf.api.ingest.workers import IngestionInterruptedError, Sent, Taken, ThreadIntake, WorkerIntake
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.record import RawEvent

ATTEMPT = "b" * 16
PATIENCE_SECONDS = 60.0


@pytest.fixture
def known(database: Database) -> Database:
    """A store that knows the attempt."""
    with database.writing() as session:
        announce(session, Announcement(ATTEMPT, "a" * 16, "a run", "/", {}), time.time())
    return database


@pytest.fixture
def workers(known: Database, starts_python: None) -> Iterator[WorkerIntake]:
    intake = WorkerIntake(known.engine.url.render_as_string(hide_password=False), 1)
    yield intake
    intake.close()
    assert multiprocessing.active_children() == []


def notes(*sequences: int) -> list[dict[str, Any]]:
    return [
        {"kind": "note", "time": 1.0, "source": "driver", "sequence": n, "level": "info", "text": "x"}
        for n in sequences
    ]


def sent(events: list[dict[str, Any]], attempt: str = ATTEMPT) -> Sent:
    return Sent(attempt, json.dumps({"events": events}).encode(), None, 10_000, None)


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def run(coroutine: Coroutine[Any, Any, Taken]) -> Taken:
    return asyncio.run(coroutine)


def stored(database: Database) -> int:
    with database.reading() as session:
        return session.scalar(select(func.count()).select_from(RawEvent)) or 0


def test_workers_store_and_refuse_as_threads_do(known: Database, workers: WorkerIntake) -> None:
    assert run(workers(sent(notes(0, 1)))).receipt.accepted == 2
    assert run(ThreadIntake(known)(sent(notes(0, 1, 2)))).receipt.duplicates == 2
    assert stored(known) == 3
    bad = [
        sent([{**notes(3)[0], "level": "loud"}]),
        sent(notes(3), attempt="c" * 16),
        Sent(ATTEMPT, b"{", None, 10, None),
        Sent(ATTEMPT, b"{}", "br", 10, None),
        Sent(ATTEMPT, sent(notes(3)).body, None, 10_000, Sender(1, 999, False)),
        sent([{**notes(3)[0], "kind": "odd", "x": nested(900)}]),
    ]
    for one in bad:
        refusals = []
        for intake in (workers, ThreadIntake(known)):
            with pytest.raises((BatchError, UnknownAttemptError, ForeignRunError)) as error:
                run(intake(one))
            refusals.append((type(error.value), str(error.value), vars(error.value)))
        assert refusals[0] == refusals[1]
    assert stored(known) == 3


def test_after_a_worker_was_killed_the_batch_is_sent_again(known: Database, workers: WorkerIntake) -> None:
    run(workers(sent(notes(0))))
    (process,) = multiprocessing.active_children()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(PATIENCE_SECONDS)
    with pytest.raises(IngestionInterruptedError, match="send the batch again"):
        run(workers(sent(notes(0, 1))))
    receipt = run(workers(sent(notes(0, 1)))).receipt
    assert (receipt.accepted, receipt.duplicates, stored(known)) == (1, 1, 2)


PARENT = """
import asyncio, sys, time, multiprocessing
from rhyme_openrlhf.api.ingest.workers import WorkerIntake
if __name__ == "__main__":
    intake = WorkerIntake(sys.argv[1], 1)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.usefixtures("starts_python")
def test_workers_end_when_the_service_is_killed(tmp_path: Any) -> None:
    script = tmp_path / "service.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), f"sqlite:///{tmp_path}/a.db"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait(PATIENCE_SECONDS)
    end = time.monotonic() + PATIENCE_SECONDS
    while alive(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(worker)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
