"""Names of the files in a run directory that more than one process reads, and how they are written in one piece.

Only the standard library, so that the reporter starts at once. `run_directory.py` says what the directory holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
EVENTS_FILE = "events.jsonl"
# How far the reporter has sent the events.
REPORTER_FILE = "reporter.json"
# Somebody asked the control plane to stop the run; the trainer looks for it between two steps.
STOP_REQUEST = "stop-request.json"
# Where the token of --control.url comes from, if not from a file.
TOKEN_VARIABLE = "RHYME_CONTROL_TOKEN"


def write_json(path: Path, content: Any) -> None:
    """Write `path` in one piece: a reader sees the old content or the new. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, default=str) + "\n")
    partial.replace(path)
