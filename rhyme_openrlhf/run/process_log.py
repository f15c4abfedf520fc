"""The last words of a worker process, from Ray's session directory on this machine."""

from __future__ import annotations

from pathlib import Path

TAIL_LINES = 8
# Enough for TAIL_LINES of any length that helps, without reading a log of gigabytes.
TAIL_BYTES = 16384


def last_lines(logs: Path, pid: int) -> list[str]:
    """The last lines that process `pid` printed, standard error last; empty if it ran on another machine.

    `logs` is the directory in which Ray keeps worker-<worker>-<job>-<pid>.out and .err.
    """
    lines: list[str] = []
    for suffix in ("out", "err"):
        for path in logs.glob(f"worker-*-{pid}.{suffix}"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
            # Ray's own markers begin with ":".
            lines += [line for line in text.splitlines() if line.strip() and not line.startswith(":")][-TAIL_LINES:]
    return lines[-TAIL_LINES:]
