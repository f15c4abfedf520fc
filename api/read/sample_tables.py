"""Reading the tables of a run's samples (telemetry/sample_table.py): prompt groups of a step, and a prompt's steps.

Invariants: as for responses (`sample_files.py`), a file that is read is a regular file below `<run directory>/samples`.
Rows and bytes have limits, which the file's own description is held to before it is read. A column that is missing or
of another type than `COLUMNS` says is null, so tables of other versions can be read.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rhyme_openrlhf.api.read.log_files import LogError, open_log
from rhyme_openrlhf.api.read.sample_files import RecordedStep, recorded_steps
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.telemetry.sample_table import BY_TOKEN, COLUMNS, GAP_BOUNDS, PART
from rhyme_openrlhf.telemetry.samples import TABLE, file_name

# A step of 4,096 prompts with 16 samples each.
MAX_ROWS = 65_536
# Most bytes of the columns that a request reads, unpacked.
MAX_BYTES = 256 * 1024 * 1024
MAX_PARTS = 64
NO_TABLES = (
    "no samples were recorded: --telemetry.sample_groups above 0 records them, in a run directory on this machine"
)
# All values of a sample but those of single tokens.
SCALARS = tuple(name for name in COLUMNS if name not in BY_TOKEN)
KNOWN_TABLES = 20_000


class NoTableError(LogError):
    """The attempt has no table of this step."""


Folders = Sequence[tuple[int, Path]]


@dataclass(frozen=True)
class Sample:
    """A row: `values` by the names of `COLUMNS`, null where the table has none, and `parts` of its reward."""

    values: dict[str, Any]
    parts: dict[str, float | None]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def accepted_share(self) -> float | None:
        """The share of its tokens that were accepted drafts."""
        accepted, tokens = self.values["accepted"], self.values["tokens"]
        return accepted / tokens if accepted is not None and tokens else None


@dataclass(frozen=True)
class Group:
    """The samples of one prompt in a step."""

    key: str
    samples: list[Sample] = field(default_factory=list)

    def first(self, name: str) -> Any:
        """Return a value of the prompt: the first sample's that has one."""
        return next((one.values[name] for one in self.samples if one.values[name] is not None), None)

    @property
    def rewards(self) -> list[float]:
        """The rewards that are known."""
        return [one.reward for one in self.samples if one.reward is not None]

    @property
    def mean(self) -> float | None:
        """Mean reward."""
        return statistics.fmean(self.rewards) if self.rewards else None

    @property
    def spread(self) -> float | None:
        """Standard deviation of the rewards, as an advantage of the group has it."""
        return statistics.stdev(self.rewards) if len(self.rewards) > 1 else None

    @property
    def has_signal(self) -> bool:
        """True where its rewards differ: equal rewards give each sample an advantage of zero."""
        return len(set(self.rewards)) > 1


def table_steps(folders: Folders) -> list[RecordedStep]:
    """Return the steps with a table, the newest first; if two attempts have a step, the newer attempt counts."""
    return recorded_steps(folders, TABLE)


def tables(folders: Folders, steps: Iterable[RecordedStep]) -> Iterator[tuple[int, Path, int]]:
    """Yield step, folder and time of change of the steps' tables; one that was deleted since it was listed is not."""
    by_number = dict(folders)
    for one in steps:
        folder = by_number[one.attempt]
        try:
            changed = (folder / file_name(one.step, TABLE)).stat().st_mtime_ns
        except OSError:
            continue
        yield one.step, folder, changed


def steps_of_prompt(folders: Folders, key: str, steps: Iterable[RecordedStep]) -> list[int]:
    """Return those of the steps in which the prompt was generated, in their order."""
    return [step for step, folder, changed in tables(folders, steps) if key in _groups_in(folder, step, changed)]


@functools.lru_cache(maxsize=KNOWN_TABLES)
def _groups_in(folder: Path, step: int, changed: int) -> frozenset[str]:
    """Return the prompts of a table, which changes as a whole alone, and then when it was `changed`."""
    try:
        return frozenset(sample.group or "" for sample in _read(folder, file_name(step, TABLE), ["group"]))
    except LogError:
        return frozenset()


def samples_of_step(folders: Folders, step: int, columns: Sequence[str] = SCALARS, key: str = "") -> list[Sample]:
    """Return the step's samples of all prompts or of one, of the newest attempt that has it. Raises LogError."""
    for _, folder in folders:
        try:
            return _read(folder, file_name(step, TABLE), columns, key)
        except NoTableError:
            continue
    raise LogError(f"no samples of step {min(step, INT32)} were recorded")


def bytes_of_step(folders: Folders, step: int) -> bytes:
    """Return the step's table as it is. Raises LogError."""
    for _, folder in folders:
        try:
            with open_log(folder, file_name(step, TABLE)) as file:
                content = file.read(MAX_BYTES + 1)
        except LogError:
            continue
        if len(content) <= MAX_BYTES:
            return content
    raise LogError(f"no samples of step {min(step, INT32)} were recorded")


def groups_of(samples: Iterable[Sample]) -> list[Group]:
    """Return the samples by prompt, in their order."""
    found: dict[str, Group] = {}
    for sample in samples:
        key = sample.group or ""
        found.setdefault(key, Group(key)).samples.append(sample)
    return list(found.values())


def gap_counts(samples: Iterable[Sample]) -> list[int]:
    """Return how many tokens of the samples are in each class of gaps; all zero if no gaps were recorded."""
    total = [0] * (len(GAP_BOUNDS) + 1)
    for sample in samples:
        counts = sample.gap_counts
        if counts is not None and len(counts) == len(total):
            total = [one + (more or 0) for one, more in zip(total, counts, strict=True)]
    return total


def _read(folder: Path, name: str, columns: Sequence[str], key: str = "") -> list[Sample]:
    """Return a table's rows. Raises LogError, NoTableError where there is no such file."""
    try:
        with open_log(folder, name) as file:
            return _rows(pq.ParquetFile(file), columns, key)
    except LogError as error:
        raise NoTableError(str(error)) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise LogError(f"{name} in the run directory's samples is no table that can be read") from error


def _rows(file: pq.ParquetFile, columns: Sequence[str], key: str) -> list[Sample]:
    schema = file.schema_arrow
    kinds = dict(zip(schema.names, schema.types, strict=True))
    wanted = [name for name in dict.fromkeys((*columns, "group")) if kinds.get(name) == COLUMNS[name][0]]
    parts = [name for name, kind in kinds.items() if name.startswith(PART) and kind == pa.float32()][:MAX_PARTS]
    parts = parts if columns != ["group"] else []
    about, chosen = file.metadata, {*wanted, *parts}
    unpacked = sum(
        about.row_group(group).column(column).total_uncompressed_size
        for group in range(about.num_row_groups)
        for column in range(about.num_columns)
        if about.row_group(group).column(column).path_in_schema.split(".")[0] in {one.split(".")[0] for one in chosen}
    )
    if about.num_rows > MAX_ROWS or unpacked > MAX_BYTES:
        raise pa.ArrowInvalid("too large")
    table = file.read([*wanted, *parts])
    if key and "group" in wanted:
        table = table.filter(pc.equal(table["group"], key))
    missing = dict.fromkeys(columns)
    return [
        Sample(
            missing | {name: _plain(row[name]) for name in wanted},
            {name.removeprefix(PART): _plain(row[name]) for name in parts},
        )
        for row in table.to_pylist()
    ]


def _plain(value: Any) -> Any:
    """Return a value without numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value
