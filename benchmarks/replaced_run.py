"""The time that another writer waits on SQLite while an import replaces a large run's events. Measured on this machine.

    python benchmarks/replaced_run.py [--events 60000] [--out replaced_run.json]

A recorded run's events, again and again, are imported. The store then lacks one of each source, so the next import
replaces all of them. Meanwhile another thread stores heartbeats of another run, by connections of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from recorded_load import Recording
from sqlalchemy import update

from rhyme_openrlhf.api.ingest.announce import Announcement, announce
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.ingest.store_batch import ingest
from rhyme_openrlhf.api.store.database import BusyError, Database
from rhyme_openrlhf.api.store.record import EventSource
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE

RUN, ATTEMPT, OTHER_RUN, OTHER = "a" * 16, "b" * 16, "c" * 16, "d" * 16
PAUSE_SECONDS = 0.02


def write_run(folder: Path, events: int) -> int:
    """Write a run directory with at least this number of events; return their number."""
    folder.mkdir()
    control = {"run_uid": RUN, "attempt_uid": ATTEMPT}
    (folder / CONFIG_FILE).write_text(json.dumps({"settings": {"control": control}}))
    recording = Recording()
    repetitions = -(-events // recording.events)
    with (folder / EVENTS_FILE).open("w") as file:
        for repetition in range(repetitions):
            file.writelines(f"{line}\n" for line in recording.lines(repetition))
    return repetitions * recording.events


class Heartbeats(threading.Thread):
    """Stores heartbeats by connections of its own; `waits` are their seconds, `refused` those that gave up."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.ending = threading.Event()
        self.waits: list[float] = []
        self.refused = 0
        self._store = Database(url)

    def run(self) -> None:
        """Run until `ending`."""
        while not self.ending.wait(PAUSE_SECONDS):
            began = time.perf_counter()
            try:
                with self._store.writing() as session:
                    ingest(session, OTHER, [], time.time())
            except BusyError:
                self.refused += 1
            self.waits.append(time.perf_counter() - began)


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=60_000)
    parser.add_argument("--out", type=Path, default=Path("replaced_run.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name).resolve() / "run", f"sqlite:///{name}/store.db"
        events = write_run(folder, chosen.events)
        store = Database(url)
        store.open()
        import_directory(store, folder, time.time())
        with store.writing() as session:
            announce(session, Announcement(OTHER, OTHER_RUN, "another", "/", {}), time.time())
            session.execute(update(EventSource).values(dropped=1))
        beats = Heartbeats(url)
        beats.start()
        began = time.perf_counter()
        done = import_directory(store, folder, time.time())
        seconds = time.perf_counter() - began
        beats.ending.set()
        beats.join()
    row = {
        "events": events,
        "replaced": done.replaced and done.accepted == events,
        "import_s": round(seconds, 1),
        "heartbeats": len(beats.waits),
        "refused": beats.refused,
        "longest_wait_s": round(max(beats.waits), 2),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(row))
    chosen.out.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
