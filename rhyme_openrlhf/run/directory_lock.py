"""One run at a time in a directory: locks on --ckpt.path and --ckpt.output_dir, with the owner's name in them.

The lock is the kernel's (flock) on a file in the directory. A killed run leaves no lock, only a file that the next run
takes over. On a shared file system, the file server drops the lock of a machine that is gone.

Invariants:
- Two runs never hold one directory, however its path is written, where the file system has locks. Where it has none,
  the run goes on and says so.
- A refused run has changed nothing in the directory.
- The driver holds the lock until all of the run's processes are ended; none of them inherits it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

OWNER_FILE = ".rhyme-owner"
# What file systems without locks answer.
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


class DirectoryLockError(Exception):
    """The run may not use a directory; the message is one sentence for the user."""


@contextmanager
def held(directories: Mapping[str, str], run: str) -> Iterator[list[str]]:
    """Hold the directories, by the flags that name them, for the run of this name; give sentences for the user.

    Raises DirectoryLockError if another run has one of them, or one cannot be written to.
    """
    said: list[str] = []
    with ExitStack() as locks:
        seen: set[str] = set()
        for flag, directory in directories.items():
            path = Path(directory).absolute()
            if (real := os.path.realpath(path)) in seen:
                continue
            seen.add(real)
            try:
                locks.enter_context(_lock(flag, path, run))
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise DirectoryLockError(
                        f"{flag} {path} cannot be written to ({error.strerror}): choose another directory"
                    ) from error
                said.append(f"{flag} {path} is on a file system without locks: let no other run use it meanwhile")
        yield said


@contextmanager
def _lock(flag: str, path: Path, run: str) -> Iterator[None]:
    path.mkdir(parents=True, exist_ok=True)
    file = path / OWNER_FILE
    descriptor = _locked(flag, path, file)
    try:
        owner = {
            "run": run,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        yield
    finally:
        # Before the lock is given back: another run that has the file open finds that it is gone.
        if _is(file, descriptor):
            file.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(flag: str, path: Path, file: Path) -> int:
    """Return the descriptor of the directory's own file, locked. Raises DirectoryLockError or OSError."""
    while True:
        # Python's descriptors are not inherited by programs that are started.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise DirectoryLockError(_in_use(flag, path, owner)) from None
        except OSError:
            os.close(descriptor)
            raise
        if _is(file, descriptor):
            return descriptor
        # Its owner ended, and removed it, between the two calls.
        os.close(descriptor)


def _is(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _in_use(flag: str, path: Path, content: bytes) -> str:
    who, gone = "another run", ""
    try:
        owner = json.loads(content)
        who = f"run {owner['run']} (process {owner['pid']} on {owner['host']}, since {owner['since']})"
        if owner["host"] != os.uname().nodename:
            gone = f"; if that machine is gone for good, delete {path / OWNER_FILE}"
    except (ValueError, KeyError, TypeError):  # the owner is just about to write it
        pass
    return f"{flag} {path} is in use by {who}: choose another directory, or wait until that run has ended{gone}"
