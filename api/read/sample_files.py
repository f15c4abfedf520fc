"""Reading a run's recorded responses (telemetry/samples.py), and no other files.

Invariants: a file that is read is a regular file below `<run directory>/samples`, checked like logs (`log_files.py`).
Lines, files and responses have size limits. Incomplete or invalid lines are counted and left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
from sqlalchemy import select

from rhyme_openrlhf.api.read.log_files import LogError, folder_of, open_log
from rhyme_openrlhf.api.store.bounds import INT32, View
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.json_values import COUNT_MAX, storable
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Attempt
from rhyme_openrlhf.telemetry.run_directory import SAMPLES_FOLDER
from rhyme_openrlhf.telemetry.samples import RECORDS, file_name, step_of

# The longest recorded text (samples.MOST_CHARACTERS), four bytes per character, and the same for pieces.
MAX_LINE = 2 * 1024 * 1024
# 64 prompts of 64 samples (--telemetry.sample_groups).
MAX_RECORDS = 4096
# Most bytes read per request, in case another program wrote the file.
MAX_BYTES = 256 * 1024 * 1024
MAX_FILES = 100_000
# Longest search text.
SEARCH_LENGTH = 500
NONE_KEPT = (
    "no responses were recorded: --telemetry.sample_groups above 0 records them, in a run directory on this machine"
)

# Bounded like the events' numbers, so that every JSON reader can hold them.
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Sort = Literal["number", "reward", "tokens", "accepted"]


class SampleRecord(msgspec.Struct):
    """One line of a file, as described in telemetry/samples.py; `number`: its line's number from 0."""

    step: Count
    group: str
    prompt: str
    pieces: list[tuple[str, str]]
    tokens: Count
    drafted: Count | None
    accepted: Count | None
    reward: float | None
    engines: list[Count]
    weight_versions: list[Count]
    finish_reason: str
    cut: bool = False
    number: int = 0

    def text(self) -> str:
        """Return the whole response."""
        return "".join(text for _, text in self.pieces)


class RecordedStep(View):
    """A step with recorded responses, and the attempt that has them."""

    step: int
    attempt: int
    bytes: int


@dataclass(frozen=True)
class Wanted:
    """A filter of records: `text` in prompt or response (ignoring case), reward bounds (included), a prompt's group."""

    text: str = ""
    group: str = ""
    min_reward: float | None = None
    max_reward: float | None = None

    def takes(self, record: SampleRecord) -> bool:
        """Return True if the record matches; a record without a reward matches no bounds."""
        if self.group and record.group != self.group:
            return False
        for bound, sign in ((self.min_reward, 1), (self.max_reward, -1)):
            if bound is not None and (record.reward is None or sign * record.reward < sign * bound):
                return False
        wanted = self.text.casefold()
        return not wanted or wanted in record.prompt.casefold() or wanted in record.text().casefold()


def samples_of(run_directory: str, roots: Sequence[Path]) -> Path:
    """Return the resolved folder of a run's records. Raises LogError if it is missing or not below a root."""
    return folder_of(run_directory, roots, SAMPLES_FOLDER)


def sample_folders(database: Database, uid: str, roots: Sequence[Path]) -> list[tuple[int, Path]]:
    """Return number and folder of each attempt that has records here, the newest first. Raises NotFoundError."""
    with database.reading() as session:
        run = find_run(session, uid)
        query = select(Attempt.number, Attempt.run_directory).where(Attempt.run_id == run.id)
        attempts = session.execute(query.order_by(Attempt.number.desc())).all()
    found = []
    for number, directory in attempts:
        try:
            found.append((number, samples_of(directory or "", roots)))
        except LogError:
            continue
    return found


def recorded_steps(folders: Sequence[tuple[int, Path]], suffix: str = RECORDS) -> list[RecordedStep]:
    """Return the steps with such files, the newest first; if two attempts have a step, the newer attempt counts."""
    found: dict[int, RecordedStep] = {}
    for number, folder in folders:
        for step, size in list_steps(folder, suffix).items():
            found.setdefault(step, RecordedStep(step=step, attempt=number, bytes=size))
    return sorted(found.values(), key=lambda one: -one.step)


def records_of_step(
    folders: Sequence[tuple[int, Path]], step: int, wanted: Wanted, sort: Sort, descending: bool
) -> tuple[list[SampleRecord], int]:
    """Return the result of `read_records` for the newest attempt that has the step. Raises LogError if none has it."""
    for _, folder in folders:
        try:
            return read_records(folder, step, wanted, sort, descending)
        except LogError:
            continue
    raise LogError(f"no responses of step {min(step, INT32)} were recorded")


def list_steps(samples: Path, suffix: str = RECORDS) -> dict[int, int]:
    """Return the bytes of each step's file of records, or of its file of another suffix."""
    found: dict[int, int] = {}
    with os.scandir(samples) as entries:
        for entry in entries:
            step = step_of(entry.name, suffix)
            if step is None or len(found) >= MAX_FILES:
                continue
            try:
                about = entry.stat(follow_symlinks=False)
            except OSError:  # deleted since, because the oldest files are removed
                continue
            if stat.S_ISREG(about.st_mode):
                found[step] = about.st_size
    return found


def read_records(
    samples: Path, step: int, wanted: Wanted, sort: Sort, descending: bool
) -> tuple[list[SampleRecord], int]:
    """Return the matching records of a step in order, and the number of invalid lines. Raises LogError without records.

    Records without a value in the sorted field come last in both directions.
    """
    try:
        with open_log(samples, file_name(step)) as file:
            lines = [(number, _record(line, number)) for number, line in _lines(file)]
    except LogError as error:
        raise LogError(f"no responses of step {step} were recorded") from error
    records = [record for _, record in lines if record is not None]
    unreadable = len(lines) - len(records)
    records = [record for record in records if wanted.takes(record)]
    key: Callable[[SampleRecord], float | None] = lambda record: getattr(record, sort)  # noqa: E731
    known = [record for record in records if key(record) is not None]
    known.sort(key=lambda record: key(record) or 0, reverse=descending)
    return known + [record for record in records if key(record) is None], unreadable


_decode = msgspec.json.Decoder(SampleRecord).decode


def _record(line: bytes | None, number: int) -> SampleRecord | None:
    if line is None:
        return None
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Invalid UTF-8 cannot be sent in a response.
    if not all(
        map(storable, (record.prompt, record.group, record.finish_reason, *(t for p in record.pieces for t in p)))
    ):
        return None
    record.number = number
    return record


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines by number; None for a line that is too long or incomplete."""
    read = 0
    for number in range(MAX_RECORDS):
        line = file.readline(MAX_LINE)
        read += len(line)
        if not line or read > MAX_BYTES:
            return
        whole = line.endswith(b"\n")
        while line and not line.endswith(b"\n") and read <= MAX_BYTES:
            line = file.readline(MAX_LINE)
            read += len(line)
        yield number, line if whole else None
