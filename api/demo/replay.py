"""Replay of a recorded run into the store, as if it were reporting now: its events, log files and responses.

The first steps are there at once. The rest arrives SPEED times as fast as it happened, through the same ingestion as a
reporter's batches. Event times are shifted so that the last event happens when it is replayed. Until then, the run is a
little behind the clock, never ahead, and its durations and rates are unchanged. After a pass the run rests, is deleted
and played again under the same address, until a request to stop.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rhyme_openrlhf.api.access.service import Service
from rhyme_openrlhf.api.demo.recording import moved, read_rows
from rhyme_openrlhf.api.ingest import deletion
from rhyme_openrlhf.api.ingest.announce import Announcement, announce
from rhyme_openrlhf.api.ingest.store_batch import ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.store.database import BusyError
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import UID_LENGTH, RunTag
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import RunFinished
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, SAMPLES_FOLDER, write_json
from rhyme_openrlhf.telemetry.samples import file_name

SPEED = 2.0
# Number of steps that are there from the beginning, because curves need some points.
FIRST_STEPS = 4
TICK_SECONDS = 0.5
# Time between two passes, in which the ended run can be looked at.
REST_SECONDS = 120.0
STOPPED = "stopped on request (a replayed recording)"


def uid_of(name: str) -> str:
    """Return a uid that is the same in every demonstration, so that links to the run stay valid."""
    return hashlib.sha256(name.encode()).hexdigest()[:UID_LENGTH]


class Replay:
    """A recorded run directory that is replayed into `directory`."""

    def __init__(
        self, service: Service, recorded: Path, directory: Path, name: str, clock: Callable[[], float] = time.time
    ) -> None:
        """Read the recording. Raises OSError, ValueError."""
        self._service = service
        self._recorded = recorded
        self._directory = directory
        self._name = name
        self._clock = clock
        self.run_uid, self.attempt_uid = uid_of(f"run {name}"), uid_of(f"attempt {name}")
        self._rows = rows = read_rows(recorded)
        ready = [row["time"] for row in rows if row["kind"] == "train_step" and row["step"] == FIRST_STEPS]
        # The recorded moment at which the replay begins; a shorter run is replayed from its first event.
        self._begin = ready[0] if ready else rows[0]["time"]
        self._first, self._end = rows[0]["time"], rows[-1]["time"]
        self._run_id = 0
        self._rewind()

    def _rewind(self) -> None:
        self._started = self._clock()
        self._shift = self._started + (self._end - self._begin) / SPEED - self._end
        self._waiting = self._rows
        self._ended = self._stopped = False

    def announce(self) -> int:
        """Create the run and its directory; return the run's row number. Raises OSError."""
        config = json.loads((self._recorded / CONFIG_FILE).read_text())
        config["settings"]["run"]["name"] = self._name
        config["settings"]["control"].update(run_uid=self.run_uid, attempt_uid=self.attempt_uid)
        (self._directory / "logs").mkdir(parents=True)
        (self._directory / SAMPLES_FOLDER).mkdir()
        write_json(self._directory / CONFIG_FILE, config)
        announcement = Announcement(self.attempt_uid, self.run_uid, self._name, str(self._directory), config)
        with self._service.database.writing() as session:
            self._run_id = announce(session, announcement, self._clock()).run_id
        return self._run_id

    def play(self, stop: threading.Event) -> None:
        """Replay to the end, and again and again, until `stop` or a request to stop the run."""
        while not self._stopped and not stop.is_set():
            if not self._ended:
                self.tick()
                stop.wait(TICK_SECONDS)
            elif not stop.wait(REST_SECONDS):
                self.again()

    def again(self) -> None:
        """Delete the run that was played, and begin a new pass with its name, notes and tags."""
        with self._service.database.writing() as session:
            run = find_run(session, self.run_uid)
            run.archived_at = self._clock()
            shown = run.name, run.notes, [one.tag for one in run.tags]
        deletion.delete_run(self._service.database, self.run_uid)
        shutil.rmtree(self._directory)
        self._rewind()
        self.announce()
        with self._service.database.writing() as session:
            run = find_run(session, self.run_uid)
            run.name, run.notes, run.tags = shown[0], shown[1], [RunTag(tag=tag) for tag in shown[2]]
        self.tick()

    def tick(self) -> None:
        """Ingest everything that is due by now."""
        due = self._begin + (self._clock() - self._started) * SPEED
        count = next((i for i, row in enumerate(self._waiting) if row["time"] > due), len(self._waiting))
        rows = [moved(row, self._shift) for row in self._waiting[:count]]
        # Files first, so that a reader who sees a step finds its responses.
        self._grow_files(due, rows)
        try:
            with self._service.database.writing() as session:
                receipt = ingest(session, self.attempt_uid, prepare(rows), self._clock(), alive=True)
        except BusyError:
            return
        self._waiting = self._waiting[count:]
        self._ended = not self._waiting
        if receipt.stop and not self._ended:
            self._finish_early()
        self._service.news.publish(self._run_id)

    def _grow_files(self, due: float, rows: list[dict[str, Any]]) -> None:
        """Write responses of trained steps, and each log up to the share of the run that has passed."""
        for row in rows:
            if row["kind"] == "train_step":
                kept = self._recorded / SAMPLES_FOLDER / file_name(row["step"])
                if kept.is_file():
                    shutil.copy(kept, self._directory / SAMPLES_FOLDER)
        passed = min(1.0, (due - self._first) / max(self._end - self._first, 1e-9))
        for log in (self._recorded / "logs").rglob("*"):
            if not log.is_file():
                continue
            data = log.read_bytes()
            # Log lines have no common time format, so they are spread evenly.
            part = data if passed >= 1 else data[: data.rfind(b"\n", 0, int(len(data) * passed)) + 1]
            target = self._directory / "logs" / log.relative_to(self._recorded / "logs")
            target.parent.mkdir(parents=True, exist_ok=True)
            written = target.stat().st_size if target.exists() else 0
            if len(part) > written:
                with target.open("ab") as file:
                    file.write(part[written:])

    def _finish_early(self) -> None:
        now = self._clock()
        following = min(row["sequence"] for row in self._waiting if row["source"] == "driver")
        row = to_json(RunFinished("stopped", STOPPED, now - self._started), now, "driver", following)
        with self._service.database.writing() as session:
            ingest(session, self.attempt_uid, prepare([row]), now, alive=False)
        self._waiting, self._ended, self._stopped = [], True, True
