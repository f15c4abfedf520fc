"""Names of the files in a run directory that more than one process reads, and how they are written in one piece.

Only the standard library, so that the reporter starts at once. `run_directory.py` says what the directory holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
EVENTS_FILE = "events.jsonl"
# Responses of chosen prompts, one file a training step (sample_files.py).
SAMPLES_FOLDER = "samples"
# How long every response was (length_records.py).
LENGTHS_FILE = "lengths.jsonl"
# How far the reporter has sent the events.
REPORTER_FILE = "reporter.json"
# Somebody asked the control plane to stop the run; the trainer looks for it between two steps.
STOP_REQUEST = "stop-request.json"
# Where the token of --control.url comes from, if not from a file.
TOKEN_VARIABLE = "RHYME_CONTROL_TOKEN"


def write_json(path: Path, content: Any) -> None:
    """Write `path` in one piece, as strict JSON: a reader sees the old content or the new. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(strict(content), indent=2, default=str, allow_nan=False) + "\n")
    partial.replace(path)


def strict(value: Any) -> Any:
    """A JSON value with its floats that are not finite as strings, as in events: a limit may be infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, (list, tuple)) else value
