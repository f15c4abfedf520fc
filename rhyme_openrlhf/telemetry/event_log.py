"""The record of a run on disk: one event a line, as JSON, only ever appended.

Invariants: every line that ends in a newline is a whole event. A process that was killed can leave at most one torn
line, the last one; readers skip that line, and the next writer removes it. A file has one `EventLog` at a time:
other processes send their events to the process that has it.
"""

from __future__ import annotations

import json
import threading
import time as clock
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rhyme_openrlhf.telemetry.event_json import EventError, parse, to_json
from rhyme_openrlhf.telemetry.events import Event, Recorded


class EventLog:
    """Appends events to a file; any thread may write."""

    def __init__(self, path: Path | str) -> None:
        """Open for appending and create if missing; the folder must exist.

        Sequence numbers go on where an earlier writer of this file ended. Raises OSError, and EventError when the file
        is not a record of events.
        """
        self.path = Path(path)
        self._lock = threading.Lock()
        self._next_sequence: dict[str, int] = {}
        if self.path.exists():
            _remove_torn_line(self.path)
            for recorded in read_events(self.path):
                self._next_sequence[recorded.source] = recorded.sequence + 1
        # Unbuffered: what a full disk takes of a line must be known, so that the next one does not begin inside it.
        self._file = self.path.open("ab", buffering=0)
        self._torn = b""

    def write(self, event: Event, source: str, time: float | None = None) -> Recorded:
        """Append one event and return it as recorded; `time` in unix seconds, now if not given.

        The operating system has the event before this returns: a killed process loses nothing that was written.
        Raises EventError when a field has the wrong type, ValueError after `close`, and OSError when the disk refuses.
        The event is then lost and its number with it, so that readers see the gap.
        """
        with self._lock:
            recorded = Recorded(
                event=event,
                time=clock.time() if time is None else time,
                source=source,
                sequence=self._next_sequence.get(source, 0),
            )
            row = to_json(event, recorded.time, source, recorded.sequence)
            self._next_sequence[source] = recorded.sequence + 1
            self._finish_torn()
            # json escapes newlines and everything beyond ASCII, so a line is one line to every reader.
            line = (json.dumps(row, allow_nan=False) + "\n").encode("ascii")
            self._torn = line[self._append(line) :]
            # A line that has begun is not lost: what is missing of it goes out before the next one.
            with suppress(OSError):
                self._finish_torn()
        return recorded

    def _append(self, data: bytes) -> int:
        """Bytes of `data` that the file took, at least one. Raises OSError when the disk refuses them all."""
        return self._file.write(data) or 0

    def _finish_torn(self) -> None:
        while self._torn:
            self._torn = self._torn[self._append(self._torn) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if not self._file.closed:
                with suppress(OSError):
                    self._finish_torn()
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path | str) -> Iterator[Recorded]:
    """Return the events of a file in the order of its lines, without unknown kinds and without a torn last line.

    Raises OSError, and EventError, naming the line, when a whole line is no event.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and (recorded := _parse_line(line, path, number)):
                yield recorded


def follow(
    path: Path | str,
    stop: Callable[[], bool],
    poll_s: float = 0.2,
    unreadable: Callable[[EventError | OSError], None] = lambda error: None,
) -> Iterator[Recorded]:
    """Return the events of a file from its start on, waiting for more until `stop()` is true.

    What was written before `stop()` turned true is still given. The file need not exist yet. Looks every `poll_s`
    seconds; the default is what a person still sees as at once. A whole line that is no event is skipped, and a file
    that cannot be read now is tried again; `unreadable` gets the error.
    """
    path = Path(path)
    offset = 0
    number = 0
    while True:
        # Asked before reading, so that the last look comes after everything the stopper had seen written.
        last_look = stop()
        try:
            lines = _whole_lines(path, offset)
        except OSError as error:
            unreadable(error)
            lines = []
        for line in lines:
            offset += len(line)
            number += 1
            try:
                recorded = _parse_line(line, path, number)
            except EventError as error:
                unreadable(error)
                continue
            if recorded:
                yield recorded
        if last_look:
            return
        clock.sleep(poll_s)


def _whole_lines(path: Path, offset: int) -> list[bytes]:
    """Return the lines from `offset` on that end in a newline; none if there is no such file.

    A torn line is read again from its start: a later writer may have removed it.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset)
        return [line for line in file if line.endswith(b"\n")]


def _parse_line(line: bytes, path: Path | str, number: int) -> Recorded | None:
    """Return the event of one whole line; `number` is for the message of EventError."""
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        raise EventError("?", where, "is not JSON") from error
    if not isinstance(row, dict):
        raise EventError("?", where, "is not a JSON object")
    try:
        return parse(row)
    except EventError as error:
        raise EventError(error.kind, error.field, f"{error} ({where})") from error


def _remove_torn_line(path: Path) -> None:
    """Cut the file behind its last newline, so that the next line starts a line."""
    with path.open("rb+") as file:
        whole = 0
        for line in file:
            if line.endswith(b"\n"):
                whole += len(line)
        file.truncate(whole)
