"""Where every process of a run sends its events, and what all of them need to know of the run.

The `Recorder` actor runs on the driver's node and appends to the run directory's event log; writers do not wait for
it. `RunServices` travels to every actor inside OpenRLHF's strategy object, which upstream hands to all of them.
Invariant: losing the recorder, or the disk it writes to, loses the record, never the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rhyme_openrlhf.ray_classes import WITHOUT_TORCH
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.telemetry import TelemetrySettings
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import Event, Note
from rhyme_openrlhf.telemetry.length_records import length_records
from rhyme_openrlhf.telemetry.run_files import LENGTHS_FILE, STOP_REQUEST
from rhyme_openrlhf.telemetry.sample_files import SampleFiles
from rhyme_openrlhf.telemetry.sample_rounds import ROUNDS
from rhyme_openrlhf.training.resume import Checkpoints

SOURCE = "recorder"
# Asked once a step. The recorder only looks for a file, but on its node, which may be busy; no answer means "go on".
STOP_ANSWER_SECONDS = 10


class PlainRecorder:
    """Appends events to one file; `Recorder` is the Ray actor class."""

    def __init__(self, path: str, telemetry: TelemetrySettings | None = None) -> None:
        """`path` is the event log's, in the run directory; responses are kept beside it."""
        self._log = EventLog(path)
        self._samples = SampleFiles(Path(path).parent, (telemetry or TelemetrySettings()).samples_mb)
        self._lengths = Path(path).with_name(LENGTHS_FILE)
        self._stop_request = Path(path).with_name(STOP_REQUEST)
        self._lost = 0
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
        """Keep the responses of a training step (telemetry/sample_records.py). A disk that refuses them loses them."""
        try:
            self._samples.write(step, lines)
        except OSError as error:
            self._not_kept("responses", step, error)

    def write_lengths(self, step: int, lines: bytes) -> None:
        """Append a step's response lengths (telemetry/length_records.py). A disk that refuses them loses them."""
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

    def stop_requested(self) -> bool:
        """Whether somebody put a stop request into the run directory."""
        return self._stop_request.exists()

    def close(self) -> None:
        """Everything written so far is in the file when this returns."""
        self._log.close()

    def _written(self, event: Event, source: str, at: float) -> bool:
        try:
            self._log.write(event, source, at)
        except OSError:
            # Only this one's: a note that is refused says nothing that a later one does not say.
            self._lost += source != SOURCE
            return False
        return True


Recorder = ray.remote(num_cpus=0, runtime_env={"env_vars": WITHOUT_TORCH})(PlainRecorder)


@dataclass(frozen=True)
class RunServices:
    """What every actor of a run may use. Handles are Ray actors; `steps_per_epoch` is None where it can vary, and
    `layouts` where there is one.
    """

    settings: RhymeSettings
    recorder: Any
    history_workers: tuple[Any, ...]
    steps_per_epoch: int | None
    checkpoint_path: str
    on_gpus: bool
    checkpoints: Checkpoints
    layouts: LayoutPlan | None = None

    def record(self, event: Event, source: str) -> None:
        """Send an event to the record, without waiting."""
        self.recorder.write.remote(event, source, time.time())

    def record_all(self, events: list[Event], source: str) -> None:
        """Send events of one moment to the record, without waiting: one message, however many engines there are."""
        self.recorder.write_all.remote(events, source, time.time())

    def record_lengths(self, step: int, samples: list[Any]) -> None:
        """Send how long a step's samples (OpenRLHF's experiences) were to the run directory, without waiting."""
        rounds = ((sample.prompts[0], getattr(sample, ROUNDS, [])) for sample in samples)
        self.recorder.write_lengths.remote(step, length_records(step, self.epoch_of(step), rounds))

    def stop_requested(self) -> bool:
        """Whether the run is asked to end; False where nobody answers."""
        try:
            return bool(ray.get(self.recorder.stop_requested.remote(), timeout=STOP_ANSWER_SECONDS))
        except ray.exceptions.RayError:
            return False

    def epoch_of(self, step: int) -> int:
        """The epoch (from 1) that training step `step` (from 1) belongs to; 1 where steps per epoch can vary."""
        return 1 if self.steps_per_epoch is None else (step - 1) // self.steps_per_epoch + 1
