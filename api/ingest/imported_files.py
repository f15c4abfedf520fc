"""The files of a run directory that is imported: its configuration, and the lines of its events.

Anybody who may write below the service's roots wrote them, so every file, line and number has a bound.

Invariants:

- Only regular files of the directory itself are read. A pipe is never waited for, and no link leads out of it.
- One line, and the events of one chunk, are in memory at a time.
- Reading ends soon after `ended` returns True, so that an import never holds up the end of the service.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rhyme_openrlhf.api.ingest.decoding import MOST_SOURCES, SourceName
from rhyme_openrlhf.api.store.json_values import COUNT_MAX
from rhyme_openrlhf.regular_files import open_below, read_at_most
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE, EVENTS_FILE

# As large as an announcement may be by default; a real configuration has some 30 KB.
LARGEST_CONFIG = 1024 * 1024
# More than the events of 30,000 steps of 64 engines with a sample a second of each.
LARGEST_EVENTS = 16 * 1024**3
# A real event has some hundred bytes, or a traceback.
LONGEST_LINE = 4 * 1024 * 1024
# Missing ranges of all sources; a file of this package has one for each time that its disk was full.
MOST_GAPS = 100_000
# Events per transaction, and their bytes: a tenth of a second, with room for other writers in between.
CHUNK, CHUNK_BYTES = 5_000, 16 * 1024 * 1024
# Lines between two looks at `ended`.
LOOK_LINES = 1000


class ImportingError(Exception):
    """The directory cannot be imported; the message is one sentence for the user."""


@dataclass
class SourceLines:
    """The events of one source in a file: the sequence after its last event, and the missing ranges before it."""

    following: int = 0
    missing: list[tuple[int, int]] = field(default_factory=list)

    def missing_below(self, sequence: int) -> int:
        """Return the number of events before `sequence` that the file lacks."""
        return sum(max(0, min(end, sequence) - begin) for begin, end in self.missing)


class _Envelope(msgspec.Struct):
    """The fields of an event that say where it belongs."""

    source: SourceName
    sequence: Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]


# Made once: two imports that made it at the same time would end the process (telemetry/events.py).
_decode = msgspec.json.Decoder(_Envelope).decode


@dataclass(frozen=True)
class ImportedFiles:
    """The files of a resolved run directory."""

    directory: Path
    ended: Callable[[], bool]

    def config(self) -> bytes:
        """Return the content of config.json. Raises OSError."""
        with open_below(self.directory, CONFIG_FILE) as file:
            return read_at_most(file, LARGEST_CONFIG, self.directory / CONFIG_FILE)

    def first_line(self) -> bytes:
        """Return the first event's line, empty if there is none. Raises OSError, ImportingError."""
        return next((line for _, line in self._lines()), b"")

    def sources(self) -> dict[str, SourceLines]:
        """Return the file's content by source. Raises OSError, ImportingError."""
        sources: dict[str, SourceLines] = {}
        gaps = 0
        for number, line in self._lines():
            try:
                row = _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise self._refused(f"line {number} is not an event: {error}") from error
            source = sources.setdefault(row.source, SourceLines())
            if row.sequence > source.following:
                source.missing.append((source.following, row.sequence))
                gaps += 1
            source.following = max(source.following, row.sequence + 1)
            if len(sources) > MOST_SOURCES or gaps > MOST_GAPS:
                raise self._refused(f"line {number}: at most {MOST_SOURCES} sources and {MOST_GAPS} gaps are imported")
        return sources

    def chunks(self) -> Iterator[list[Any]]:
        """Yield the parsed events in pieces. Raises OSError, ImportingError and errors of msgspec."""
        lines = self._lines()
        decode = msgspec.json.Decoder().decode
        for _, first in lines:
            chunk, size = [decode(first)], len(first)
            for _, line in itertools.islice(lines, CHUNK - 1):
                chunk.append(decode(line))
                size += len(line)
                if size > CHUNK_BYTES:
                    break
            yield chunk

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield complete lines with their numbers, without an incomplete last line of a killed writer."""
        with open_below(self.directory, EVENTS_FILE) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_EVENTS:
                raise self._refused(f"more than {LARGEST_EVENTS} bytes are not imported")
            for number in itertools.count(1):
                line = file.readline(LONGEST_LINE)
                if len(line) == LONGEST_LINE:
                    raise self._refused(f"line {number} has {LONGEST_LINE} bytes or more, which no event has")
                if not line.endswith(b"\n"):
                    return
                if number % LOOK_LINES == 0:
                    self.go_on()
                yield number, line

    def go_on(self) -> None:
        """Raise ImportingError if the service is ending."""
        if self.ended():
            raise ImportingError("the service is ending: import the directory again")

    def _refused(self, fault: str) -> ImportingError:
        return ImportingError(f"{self.directory / EVENTS_FILE}, {fault}")
