"""Opening files that a user names, or that other programs write: regular files only, without waiting for anything.

Invariants:

- A pipe, a device or a socket is refused, and its other end is never waited for.
- A file of a folder is below that folder also after links were followed, and if a link replaces one of its folders
  while it is opened.
- The entries of a folder are its own, also if a link replaces it or one of its folders meanwhile.
- `read_regular` reads a bounded number of bytes.

Every refusal is an OSError whose `strerror` says why and whose `filename` says where.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file; links are followed. Raises OSError."""
    try:
        return _checked(os.open(path, _OPEN), path)
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, "it is no valid path", str(path)) from error


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open the regular file `name` below the resolved `folder`; links may lead to files below it. Raises OSError."""
    place = str(folder / name)
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise OSError(errno.ENOENT, "it is no path below its folder", place)
    try:
        path = (folder / name).resolve()
    except (RuntimeError, ValueError) as error:  # a loop of links, a null byte
        raise OSError(errno.EINVAL, "it is no valid path", place) from error
    if not path.is_relative_to(folder):
        raise OSError(errno.EACCES, "it is a link that leads out of its folder", place)
    return _checked(_open_without_links(path), path)


def entries_below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all entries below the resolved `folder` but folders, with their paths in it. No link is followed.

    Raises OSError if `folder` itself cannot be opened.
    """
    top = _open_without_links(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for directory, folders, names, descriptor in os.fwalk(".", dir_fd=top):
            folders.sort()
            for name in sorted(names):
                try:
                    about = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except OSError:  # deleted since it was listed
                    continue
                yield os.path.normpath(os.path.join(directory, name)), about
    finally:
        os.close(top)


def read_regular(path: Path, largest: int) -> bytes:
    """Return the content of a regular file of at most `largest` bytes. Raises OSError."""
    with open_regular(path) as file:
        return read_at_most(file, largest, path)


def read_at_most(file: BinaryIO, largest: int, path: Path) -> bytes:
    """Return the rest of an open file, at most `largest` bytes; `path` names it in errors. Raises OSError."""
    content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it has more than {largest} bytes", str(path))
    return content


def _open_without_links(path: Path, flags: int = _OPEN) -> int:
    """Open a resolved path folder by folder, so that a link that was put there since it was resolved is an error."""
    below = os.open(path.anchor, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in path.parts[1:-1]:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=below)
            os.close(below)
            below = inner
        return os.open(path.name or ".", flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=below)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(below)


def _checked(descriptor: int, path: Path) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
