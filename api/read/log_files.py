"""Reading a run's log files, and no other files.

Invariants: a file that is read is a regular file below `<run directory>/logs`. The run directory is below one of the
configured roots. Symbolic links are resolved before these checks. At most `MAX_CHUNK` bytes are read at once.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.bounds import View
from rhyme_openrlhf.api.store.lookup import find_attempt, find_run
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.regular_files import entries_below, open_below

# Most bytes that a page shows at once; it loads more in pieces.
MAX_CHUNK = 1024 * 1024
# Most files listed: far more than a cluster has processes, each of which has one log.
MAX_FILES = 5000
# Length of the longest UTF-8 character.
UTF8_BYTES = 4
# Ray writes the actor's name before the actor's own output; imports may have written something before.
NAME_BYTES = 4096
_ACTOR_NAME = re.compile(rb"^:actor_name:([\x21-\x7e]{1,100})\s*$", re.MULTILINE)


class LogError(Exception):
    """The file cannot be read; the message is one sentence."""


class LogFileView(View):
    """A log file."""

    name: str = Field(description="Path below the run directory's logs/.")
    process: str = Field(description="The Ray actor that writes it; empty if unknown.")
    size: int = Field(description="Bytes.")
    modified_at: float


class LogChunk(View):
    """A part of a log: bytes `start` to `end` (exclusive) of `size`."""

    text: str
    start: int
    end: int
    size: int


def folder_of(run_directory: str, roots: Sequence[Path], name: str) -> Path:
    """Return the resolved folder `name` of a run directory. Raises LogError if it is missing or not below a root."""
    if not run_directory or "\0" in run_directory:
        raise LogError("the run has reported no run directory")
    try:
        run = Path(run_directory).resolve()
        folder = (run / name).resolve()
    except (OSError, RuntimeError) as error:
        raise LogError("the run directory cannot be resolved") from error
    if not any(run.is_relative_to(root) for root in roots) or not folder.is_relative_to(run):
        raise LogError("the run directory is not below the service's roots (--serve.roots)")
    if not folder.is_dir():
        raise LogError(f"the run directory has no {name} on this machine")
    return folder


def newest_directory(session: Session, run: Run, roots: Sequence[Path]) -> Path | None:
    """Return the resolved run directory of the newest attempt whose directory is here and below a root; else None."""
    query = select(Attempt.run_directory).where(Attempt.run_id == run.id).order_by(Attempt.number.desc())
    for directory in session.scalars(query):
        try:
            return folder_of(directory or "", roots, ".")
        except LogError:
            continue
    return None


def logs_of(run_directory: str, roots: Sequence[Path]) -> Path:
    """Return the resolved logs directory of a run. Raises LogError if it is missing or not below a root."""
    return folder_of(run_directory, roots, "logs")


def list_logs(logs: Path) -> list[LogFileView]:
    """Return the regular files below `logs` (from `logs_of`), by name, with the processes that write them."""
    found = sorted(itertools.islice(files_below(logs), MAX_FILES), key=lambda file: file[0])
    return [
        LogFileView(name=name, process=_process(logs, name), size=about.st_size, modified_at=about.st_mtime)
        for name, about in found
    ]


def files_below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files below a folder, with names relative to it that can be printed."""
    # The folder may be gone since it was resolved, or a link.
    with suppress(OSError):
        for below, about in entries_below(folder):
            if stat.S_ISREG(about.st_mode) and below.isprintable():
                yield below, about


def logs_of_attempt(session: Session, uid: str, number: int, roots: Sequence[Path]) -> Path:
    """Return the resolved logs directory of an attempt of the run `uid`. Raises NotFoundError, LogError."""
    return logs_of(find_attempt(session, find_run(session, uid), number).run_directory or "", roots)


def _process(logs: Path, name: str) -> str:
    try:
        with open_log(logs, name) as file:
            return process_name(file)
    except LogError:  # deleted since it was listed
        return ""


@contextmanager
def open_log(logs: Path, name: str) -> Iterator[BinaryIO]:
    """Open one file below `logs`. Raises LogError for anything but a regular file there."""
    try:
        file = open_below(logs, name)
    except OSError as error:
        raise LogError("this log does not exist") from error
    with file:
        yield file


def read_range(file: BinaryIO, start: int, length: int) -> LogChunk:
    """Return at most `length` bytes from `start` on; an incomplete character at the end is left for the next piece."""
    size = os.fstat(file.fileno()).st_size
    start = min(start, size)
    file.seek(start)
    return _chunk(file.read(min(length, MAX_CHUNK)), start, size)


def read_tail(file: BinaryIO, lines: int, before: int | None = None) -> LogChunk:
    """Return the last `lines` lines, or those before byte `before`; at most MAX_CHUNK bytes."""
    size = os.fstat(file.fileno()).st_size
    end = size if before is None else min(before, size)
    start = max(0, end - MAX_CHUNK)
    file.seek(start)
    data = file.read(end - start)
    # The newline that ends the last line begins no new line.
    position = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            break
    first = position + 1
    return _chunk(data[first:], start + first, size)


def _chunk(data: bytes, start: int, size: int) -> LogChunk:
    """Return `data` as text without an incomplete last character; invalid UTF-8 is replaced."""
    data = _whole_characters(data)
    return LogChunk(text=data.decode("utf-8", "replace"), start=start, end=start + len(data), size=size)


def process_name(file: BinaryIO) -> str:
    """Return Ray's name of the actor that writes this log, or ""; it is in the first lines."""
    file.seek(0)
    found = _ACTOR_NAME.findall(file.read(NAME_BYTES))
    return found[-1].decode("utf-8", "replace") if found else ""


def read_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the whole file with its current size."""
    left = os.fstat(file.fileno()).st_size
    file.seek(0)
    while left > 0 and (block := file.read(min(left, MAX_CHUNK))):
        left -= len(block)
        yield block


def _whole_characters(data: bytes) -> bytes:
    """Return `data` without an incomplete last character."""
    for back in range(1, min(UTF8_BYTES, len(data)) + 1):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:  # inside a character
            continue
        needs = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        # An incomplete character alone is returned unchanged, so that a file of invalid bytes cannot block its reader.
        return data[:-back] if needs > back and len(data) > back else data
    return data
