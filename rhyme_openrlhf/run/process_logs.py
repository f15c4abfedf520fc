"""The last words of a process of Ray: the lines before its end, and the error from which the others followed.

Ray keeps worker-<worker>-<job>-<pid>.out and .err of each process on the node's own disk. An engine's core is a process
of its own that prints to its actor's files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

TAIL_LINES = 8
# Enough for TAIL_LINES of any length that helps, without reading a log of gigabytes.
TAIL_BYTES = 16384
# Two processes' tracebacks stand between the error and the end.
ERROR_BYTES = 1 << 18
# What vLLM's front end says when its core could not start (vLLM 0.29.0 and 0.32.0, v1/engine/utils.py).
CORE_FAILED = "See root cause above"
ERROR = re.compile(r"\b(?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*")


def last_lines(folders: Sequence[Path], worker: str) -> list[str]:
    """Return the last lines that a worker of Ray printed, standard error last; `worker` is its id.

    They come from the first of the `folders` that has any: Ray's log directory here, and copies from other nodes. A
    process number would not do, because each node has its own.
    """
    for folder in folders:
        lines: list[str] = []
        for suffix in ("out", "err"):
            lines += _tail(folder, f"worker-{worker}-*", suffix, TAIL_BYTES)[-TAIL_LINES:]
        if lines:
            return lines[-TAIL_LINES:]
    return []


def core_error(folders: Sequence[Path], worker: str) -> str:
    """Return the error by which the engine core of a worker ended ("ValueError: ..."), or ""."""
    found = (_core_error(folder, f"worker-{worker}-*") for folder in folders)
    return next(filter(None, found), "")


def core_error_of_process(logs: Path, pid: int) -> str:
    """Return the same of process `pid`, whose worker is not known."""
    return _core_error(logs, f"worker-*-{pid}")


def _core_error(folder: Path, names: str) -> str:
    for suffix in ("err", "out"):
        found = [match[0] for line in _tail(folder, names, suffix, ERROR_BYTES) if (match := ERROR.search(line))]
        if own := [error for error in found if CORE_FAILED not in error]:
            return own[-1]
    return ""


def _tail(folder: Path, names: str, suffix: str, size: int) -> list[str]:
    lines: list[str] = []
    for path in folder.glob(f"{names}.{suffix}"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read().decode(errors="replace")
        # Ray's own markers begin with ":".
        lines += [line for line in text.splitlines() if line.strip() and not line.startswith(":")]
    return lines
