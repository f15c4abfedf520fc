"""The last words of a process of Ray: the lines before its end, and the error from which the others followed.

Ray keeps worker-<worker>-<job>-<pid>.out and .err of each process on the node's own disk. An engine's core is a process
of its own that prints to its actor's files.
"""

from __future__ import annotations

import re
from pathlib import Path

TAIL_LINES = 8
# Enough for TAIL_LINES of any length that helps, without reading a log of gigabytes.
TAIL_BYTES = 16384
# Two processes' tracebacks stand between the error and the end.
ERROR_BYTES = 1 << 18
# What vLLM's front end says when its core could not start (vLLM 0.29.0 and 0.32.0, v1/engine/utils.py).
CORE_FAILED = "See root cause above"
ERROR = re.compile(r"\b(?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*")


def last_lines(logs: Path, pid: int) -> list[str]:
    """Return the last lines that process `pid` printed, standard error last; empty if it ran on another machine.

    `logs` is Ray's log directory.
    """
    lines: list[str] = []
    for suffix in ("out", "err"):
        lines += _tail(logs, pid, suffix, TAIL_BYTES)[-TAIL_LINES:]
    return lines[-TAIL_LINES:]


def core_error(logs: Path, pid: int) -> str:
    """Return the error by which the engine core of process `pid` ended ("ValueError: ..."), or ""."""
    for suffix in ("err", "out"):
        found = [match[0] for line in _tail(logs, pid, suffix, ERROR_BYTES) if (match := ERROR.search(line))]
        if own := [error for error in found if CORE_FAILED not in error]:
            return own[-1]
    return ""


def _tail(logs: Path, pid: int, suffix: str, size: int) -> list[str]:
    lines: list[str] = []
    for path in logs.glob(f"worker-*-{pid}.{suffix}"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read().decode(errors="replace")
        # Ray's own markers begin with ":".
        lines += [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return lines
