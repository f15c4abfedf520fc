"""Kept responses on disk: `samples/step-000012.jsonl` in the run directory, one record a line (sample_records.py).

Invariants: a file appears whole or not at all; together they hold at most the given MB, those of the oldest steps go
first; a step that is done again (after a resume into the same directory) replaces its file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rhyme_openrlhf.telemetry.run_files import SAMPLES_FOLDER

MEGABYTE = 1024 * 1024
_NAME = re.compile(r"step-(\d{6,9})\.jsonl")


def file_name(step: int) -> str:
    """The file of a step's records; names sort as steps do for the first million of them."""
    return f"step-{step:06d}.jsonl"


def step_of(name: str) -> int | None:
    """The step whose file has this name; None: it is no file of records."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class SampleFiles:
    """Writes a run's files; one writer a run directory."""

    def __init__(self, run_directory: Path, most_mb: int) -> None:
        self._folder = run_directory / SAMPLES_FOLDER
        self._most = most_mb * MEGABYTE
        self._sizes: dict[int, int] = {}

    def write(self, step: int, lines: Sequence[bytes]) -> None:
        """Write a step's records, and delete those of the oldest steps where there are too many. Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / file_name(step)
        partial = path.with_suffix(".partial")
        try:
            size = partial.write_bytes(b"".join(lines))
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._sizes[step] = size
        while sum(self._sizes.values()) > self._most and len(self._sizes) > 1:
            oldest = min(self._sizes)
            del self._sizes[oldest]
            (self._folder / file_name(oldest)).unlink(missing_ok=True)
