"""Files in shared memory that are named after the process they belong to, so that those of a dead one can be removed.

Invariant: a file of a process that lives is never removed; a process number that was used again does not keep the files
of the process that had it before.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def process_started(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None when there is no such process.

    Number and start together identify a process for good, because process numbers are used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and brackets; field 22 of stat(5) is the 20th after its closing bracket.
    return int(stat.rpartition(")")[2].split()[19])


def owned_prefix(kind: str) -> str:
    """Return the beginning of the names of this process's files of a kind."""
    return f"{kind}-{os.getpid()}-{process_started(os.getpid())}-"


def remove_stale(kind: str, folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove files of a kind whose process is gone; returns their names."""
    name = re.compile(re.escape(kind) + r"-(?P<pid>\d+)-(?P<started>\d+)-.*")
    removed = []
    for path in folder.glob(f"{kind}-*"):
        match = name.fullmatch(path.name)
        if match and process_started(int(match["pid"])) != int(match["started"]):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
