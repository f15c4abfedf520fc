"""Files in shared memory that belong to a process, so that those of a dead one can be removed.

A file's owner holds a lock on it (flock) for as long as the owner lives. The kernel keeps the lock, so it holds between
containers and users that share the folder, where a process number means nothing.

Invariant: a file of a process that lives is never removed. Files that only another user may open are left alone.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from functools import cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def owned_prefix(kind: str) -> str:
    """Return the beginning of the names of this process's files of a kind."""
    return f"{kind}-{os.getpid()}-{_mark(os.getpid())}-"


@cache
def _mark(pid: int) -> str:
    """Return what tells process `pid` from one of the same number in another container."""
    return uuid.uuid4().hex[:12]


class OwnedFiles:
    """Files of one kind in one folder that this process owns. Making it removes those of dead processes."""

    def __init__(self, kind: str, folder: Path = SHARED_MEMORY) -> None:
        remove_stale(kind, folder)
        self._prefix = str(folder / owned_prefix(kind))
        self._locks: dict[str, int] = {}

    def path(self, name: str) -> str:
        """Return the path of the file `name`, made or not."""
        return self._prefix + name

    def make(self, name: str) -> str:
        """Make an empty file and return its path. Raises OSError."""
        path = self.path(name)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                self._locks[path] = descriptor
                return path
            # It was taken for a dead process's between the two calls.
            os.close(descriptor)

    def rename(self, path: str, name: str) -> str:
        """Give a file another name, and return its new path. Raises OSError."""
        renamed = self.path(name)
        os.rename(path, renamed)
        self._locks[renamed] = self._locks.pop(path)
        return renamed

    def remove(self, path: str) -> None:
        """Remove a file; who has it open may go on using it. Safe to do twice, and for files of other owners."""
        Path(path).unlink(missing_ok=True)
        lock = self._locks.pop(path, None)
        if lock is not None:
            os.close(lock)


def remove_stale(kind: str, folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove files of a kind that no process owns; return their names."""
    return [path.name for path in folder.glob(f"{kind}-*") if _remove_unowned(path)]


def _remove_unowned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # another user's, or gone
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # owned, or another user's
        return False
    finally:
        os.close(descriptor)
    return True
