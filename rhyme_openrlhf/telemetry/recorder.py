"""The recorder: the actor to which all processes of a run send their events.

`Recorder` runs on the driver's node and appends to the run directory's event log; writers do not wait for it. Ray
restarts one that died.

Invariants:
- Losing the recorder, or the disk it writes to, loses the record, never the run.
- A restarted recorder goes on where the file ends; events that were on their way are lost.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import ray

from rhyme_openrlhf.ray_classes import WITHOUT_TORCH
from rhyme_openrlhf.settings.telemetry import TelemetrySettings
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import Event, Note
from rhyme_openrlhf.telemetry.run_directory import LENGTHS_FILE, STOP_REQUEST
from rhyme_openrlhf.telemetry.sample_table import encoded_table
from rhyme_openrlhf.telemetry.samples import SampleFiles

SOURCE = "recorder"
# Events that are kept for `take_lost`; the supervisor takes them every few seconds.
MOST_LOST = 1000


class PlainRecorder:
    """Appends events to one file; `Recorder` is the Ray actor class."""

    def __init__(self, path: str, telemetry: TelemetrySettings | None = None) -> None:
        """`path` is the event log's, in the run directory; responses are kept beside it."""
        self._log = EventLog(path)
        self._samples = SampleFiles(Path(path).parent, (telemetry or TelemetrySettings()).samples_mb)
        self._lengths = Path(path).with_name(LENGTHS_FILE)
        self._stop_request = Path(path).with_name(STOP_REQUEST)
        self._lost = 0
        self._lost_progress: deque[Event] = deque(maxlen=MOST_LOST)
        self._refused: set[str] = set()

    def write(self, event: Event, source: str, at: float) -> None:
        """Append one event that `source` says happened at unix time `at`.

        A disk that refuses it loses the event, not the run; how many were lost is noted once it takes events again.
        """
        if self._written(event, source, at) and self._lost:
            text = f"{self._lost} events could not be written to {self._log.path} (disk full?) and are lost"
            if self._written(Note("warning", text), SOURCE, time.time()):
                self._lost = 0

    def write_all(self, events: list[Event], source: str, at: float) -> None:
        """`write` for several events of the same moment."""
        for event in events:
            self.write(event, source, at)

    def write_samples(self, step: int, lines: list[bytes]) -> None:
        """Keep the responses of a training step (telemetry/samples.py). A disk that refuses them loses them."""
        try:
            self._samples.write(step, lines)
        except OSError as error:
            self._not_kept("responses", step, error)

    def write_sample_table(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Keep the table of a training step's samples (telemetry/sample_table.py). A disk that refuses it loses it."""
        try:
            self._samples.write_table(step, encoded_table(rows))
        except OSError as error:
            self._not_kept("the table of samples", step, error)

    def write_lengths(self, step: int, lines: bytes) -> None:
        """Append a step's response lengths (telemetry/samples.py). A disk that refuses them loses them."""
        try:
            with self._lengths.open("ab") as file:
                file.write(lines)
        except OSError as error:
            self._not_kept("response lengths", step, error)

    def _not_kept(self, what: str, step: int, error: OSError) -> None:
        """Say so, once for each kind."""
        if what not in self._refused:
            self._refused.add(what)
            text = f"{what} of step {step} could not be kept in the run directory: {error.strerror}"
            self.write(Note("warning", text), SOURCE, time.time())

    def take_lost(self) -> list[Event]:
        """Return the events of progress that could not be written since the last call, in their order."""
        lost = list(self._lost_progress)
        self._lost_progress.clear()
        return lost

    def stop_requested(self) -> bool:
        """Return whether a stop request is in the run directory."""
        return self._stop_request.exists()

    def close(self) -> None:
        """Close the file, with all that was written so far in it."""
        self._log.close()

    def _written(self, event: Event, source: str, at: float) -> bool:
        try:
            self._log.write(event, source, at)
        except OSError:
            # Only this one's: a note that is refused says nothing that a later one does not say.
            self._lost += source != SOURCE
            if event.progress:
                self._lost_progress.append(event)
            return False
        return True


Recorder = ray.remote(num_cpus=0, runtime_env={"env_vars": WITHOUT_TORCH})(PlainRecorder)
