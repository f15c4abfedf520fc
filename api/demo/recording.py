"""Recorded runs in one file, for `rhyme serve --demo`. Pure.

An archive holds run directories (config, events, summary, responses, logs), each below its name. Invariants: an archive
writes only below the folder into which it is unpacked. Moving a run in time shifts all times in its events equally, so
that durations and rates do not change.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE, SAMPLES_FOLDER

# Recorded parts of a run directory; checkpoints, history and Ray's own files are left out.
PARTS = (CONFIG_FILE, EVENTS_FILE, "summary.json", SAMPLES_FOLDER, "logs")
# Fields of events that hold moments, besides those of the envelope.
_MOMENTS = {"engine_interval": ("start", "end")}


class RecordingError(Exception):
    """A recording cannot be made or read; the message is one sentence."""


def pack(archive: Path, runs: Mapping[str, Path], replacements: Sequence[tuple[str, str]]) -> int:
    """Write run directories into `archive` under their names; return its size in bytes.

    `replacements` (paths and names of the machine) are applied to every file's text, one after the other. Raises
    OSError.
    """
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name, run in runs.items():
            for path in sorted(_files(run)):
                text = path.read_text(encoding="utf-8", errors="replace")
                for old, new in replacements:
                    text = text.replace(old, new)
                data = text.encode()
                about = tarfile.TarInfo(f"{name}/{path.relative_to(run).as_posix()}")
                about.size = len(data)
                about.mode = 0o644
                tar.addfile(about, io.BytesIO(data))
    return archive.stat().st_size


def unpack(archive: Path, into: Path) -> list[Path]:
    """Unpack the archive's run directories below `into`; return them by name. Raises RecordingError, OSError."""
    try:
        with tarfile.open(archive, "r:xz") as tar:
            # Not by `extractall`, whose filter Debian 12's Python 3.11.2 does not have.
            for member in tar:
                _write(tar, member, into)
    except (tarfile.TarError, EOFError) as error:
        raise RecordingError(f"the recording {archive} cannot be read: {error}") from error
    found = sorted(path for path in into.iterdir() if (path / EVENTS_FILE).is_file())
    if not found:
        raise RecordingError(f"the recording {archive} holds no run")
    return found


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Write a member below `into`. Raises RecordingError for links, devices and paths outside of it."""
    path, content = into / member.name, tar.extractfile(member) if member.isfile() else None
    if content is None or not path.resolve().is_relative_to(into.resolve()):
        raise RecordingError(f"the recording has '{member.name}', which is no file below its folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.read())


def _files(run: Path) -> Iterator[Path]:
    for part in PARTS:
        path = run / part
        if path.is_dir():
            yield from (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        elif path.is_file():
            yield path


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Return a run's events as JSON objects, in the order of writing. Raises OSError, ValueError."""
    with (run / EVENTS_FILE).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def moved(row: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the event with all its times shifted by `seconds`."""
    shifted = dict(row)
    for field in ("time", *_MOMENTS.get(row["kind"], ())):
        shifted[field] = row[field] + seconds
    return shifted


def move_run(run: Path, ends_at: float) -> None:
    """Rewrite a run directory's events so that its last one happens at `ends_at` (unix seconds)."""
    rows = read_rows(run)
    seconds = ends_at - max(row["time"] for row in rows)
    with (run / EVENTS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(moved(row, seconds)) + "\n" for row in rows)
