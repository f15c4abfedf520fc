"""A run's archive: all responses to its prompts, in files that outlive the run and that other runs read.

The directory of an archive is `<run>/history/archive`, or one of its own below `--history.store`:

- `run.json`: the run, and the tokenizer of its tokens (`About`);
- `worker-N.responses`: the records of history worker N, as in a journal (history/journal.py), in the order they came.

A checkpoint's history can be read like an archive. It has the last rollouts of each prompt only.

Invariants:
- A file has one writer, which only appends whole entries. So readers need no lock, also while the run goes on. A torn
  end (a killed writer) is passed over by readers and cut off when the writer starts again.
- An archive never grows beyond its limit. The first epochs stay, because another run's first epoch needs them most.
- Reading a file ends, takes no more memory than the file has, and raises nothing but `ArchiveError`, also where a file
  was damaged or made to do harm.
- Only the user who made an archive can read it (mode 0700), because prompts and responses are people's data.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rhyme_openrlhf.history.journal import ENTRY, HEADER, MAGIC, NO_RUN, VERSION, entry, read_entries
from rhyme_openrlhf.history.record import HEAD, MOST_RATIO, NO_ROLLOUT
from rhyme_openrlhf.regular_files import open_regular, read_regular
from rhyme_openrlhf.telemetry.run_directory import write_json

ABOUT_FILE = "run.json"
FORMAT = 1
# In a run directory.
FOLDER = Path("history") / "archive"
# Files of an archive, and of a checkpoint's history (training/checkpoint.py), which has this file beside them.
RESPONSES, OF_CHECKPOINT = "worker-*.responses", "history-*-of-*"
CHECKPOINT_STATE = "state.json"
ONLY_MINE, MINE_TO_WRITE = 0o700, 0o600
# The run directory of a control plane's job.
ATTEMPT = re.compile(r"attempt-\d+")
# Bytes of what is read whole: a description, a checkpoint's state, an entry. Others are held to be damaged.
LARGEST_ABOUT, LARGEST_STATE, LARGEST_ENTRY = 1 << 16, 1 << 28, 1 << 30
# Directories beside a run that are looked into, the newest first.
MOST_LOOKED_AT = 200
# Keys of prompts have 32 bytes, and a few more for a round.
LONGEST_KEY = 96


class ArchiveError(Exception):
    """A directory holds no archive that can be read; the message says which, and why."""


@dataclass(frozen=True)
class About:
    """The run that wrote an archive: its name, its tokenizer's fingerprint, its model, and when it started (unix)."""

    run: str
    tokenizer: str
    model: str = ""
    started: float = 0.0


@dataclass(frozen=True)
class Archive:
    """An archive, or a checkpoint's history; `pattern` names its files."""

    directory: Path
    about: About
    pattern: str = RESPONSES

    @property
    def files(self) -> list[Path]:
        """The files there are now; none where the directory is gone."""
        return sorted(self.directory.glob(self.pattern))

    @property
    def sizes(self) -> dict[str, int]:
        """Each file's name and size in bytes now."""
        found = {}
        for path in self.files:
            try:
                found[path.name] = path.stat().st_size
            except OSError:
                continue
        return found


class Stored(NamedTuple):
    """One record's place in an archive: its step, the file's number there, offset and bytes of its entry, its tokens.

    `tokens` is what the record says of itself.
    """

    rollout_id: int
    file: int
    offset: int
    size: int
    tokens: int


def read_archive(directory: Path) -> Archive:
    """Return the archive in a directory. Raises ArchiveError."""
    path = directory / ABOUT_FILE
    try:
        found = json.loads(read_regular(path, LARGEST_ABOUT))
    except FileNotFoundError:
        raise ArchiveError(f"{directory} has no archive of responses") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArchiveError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ArchiveError(f"{path} is no description of an archive of format {FORMAT}")
    try:
        about = About(str(found["run"]), str(found["tokenizer"]), str(found["model"]), float(found["started"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArchiveError(f"{path} lacks what an archive says of itself: {error}") from error
    if not math.isfinite(about.started):
        raise ArchiveError(f"{path} has no time at which its run started")
    return Archive(directory, about)


def read_checkpoint(directory: Path) -> Archive:
    """Return the history in a checkpoint's directory (`_rhyme/<tag>`). Raises ArchiveError."""
    path = directory / CHECKPOINT_STATE
    try:
        state = json.loads(read_regular(path, LARGEST_STATE))
    except (OSError, ValueError, RecursionError) as error:
        raise ArchiveError(f"{directory} is no checkpoint: {error}") from error
    tokenizer = state.get("tokenizer", "") if isinstance(state, dict) else ""
    if not tokenizer or not list(directory.glob(OF_CHECKPOINT)):
        raise ArchiveError(f"{directory} is a checkpoint without a history that other runs can read")
    return Archive(directory, About(f"checkpoint {directory.name}", str(tokenizer)), OF_CHECKPOINT)


class ArchiveWriter:
    """Appends the records of one history worker to its file of the run's archive. Raises OSError as a disk does."""

    def __init__(self, directory: Path, about: About, number: int, limit_bytes: int) -> None:
        self.full = False
        """Whether a record did not fit; none is written from then on."""
        self._limit = limit_bytes
        directory.mkdir(mode=ONLY_MINE, parents=True, exist_ok=True)
        directory.chmod(ONLY_MINE)
        if not (directory / ABOUT_FILE).exists():
            # Workers start together, and each writes the same.
            write_json(directory / ABOUT_FILE, {"format": FORMAT, **asdict(about)})
        path = directory / RESPONSES.replace("*", str(number))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, MINE_TO_WRITE)
        self._size = HEADER.size
        if os.fstat(self._file).st_size < HEADER.size:
            os.truncate(self._file, 0)
            os.write(self._file, HEADER.pack(MAGIC, VERSION, NO_RUN))
        else:
            for _, self._size in read_entries(path, NO_RUN):
                pass
            os.truncate(self._file, self._size)

    def add(self, encoded: bytes) -> bool:
        """Append an encoded record; return False where it no longer fits into the archive's limit."""
        if self.full or self._size + ENTRY.size + len(encoded) > self._limit:
            self.full = True
            return False
        whole = entry(encoded)
        written = 0
        while written < len(whole):
            written += os.write(self._file, whole[written:])
        self._size += written
        return True

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        os.close(self._file)


@dataclass
class ArchiveReader:
    """Reads an archive that may still grow. `limits`: bytes to read of each file, by name (None: all that come).

    `refused` says what is wrong with it, once there is something.
    """

    archive: Archive
    limits: Mapping[str, int] | None = None
    refused: str = ""
    _paths: list[Path] = field(default_factory=list)
    _read: list[int] = field(default_factory=list)

    def new(self) -> Iterator[tuple[str, Stored]]:
        """Yield the prompt key and place of each record that came since the last call."""
        known = set(self._paths)
        for path in self.archive.files:
            if path not in known:
                self._paths.append(path)
                self._read.append(0)
        for number, path in enumerate(self._paths):
            try:
                file = open_regular(path)
            except OSError:
                # Deleted, which takes nothing from those that were read before but their tokens.
                continue
            with file:
                try:
                    yield from self._new_in(number, path, file.fileno())
                except OSError as error:
                    self.refused = f"{path} cannot be read: {error.strerror}"

    def _new_in(self, number: int, path: Path, file: int) -> Iterator[tuple[str, Stored]]:
        size = os.fstat(file).st_size
        if self.limits is not None:
            size = min(size, self.limits.get(path.name, 0))
        at = self._read[number]
        if at == 0:
            header = os.pread(file, HEADER.size, 0)
            if len(header) < HEADER.size:
                return
            magic, version, _ = HEADER.unpack(header)
            if (magic, version) != (MAGIC, VERSION):
                self.refused = f"{path} is no history of version {VERSION}"
                return
            at = HEADER.size
        last: tuple[str, Stored] | None = None
        while at + ENTRY.size + HEAD.size <= size:
            beginning = os.pread(file, ENTRY.size + HEAD.size + LONGEST_KEY, at)
            found = _first_of(beginning, at, number, size)
            if found is None:
                # Not whole yet; or damaged, and then this file has no more.
                break
            if last is not None and last[1].rollout_id != NO_ROLLOUT:
                yield last
            self._read[number], last = at, found
            at += found[1].size
        # The machine may have crashed within the last one, and left zeros in its place.
        if last is not None and _content(os.pread(file, last[1].size, last[1].offset)) is not None:
            self._read[number] = at
            if last[1].rollout_id != NO_ROLLOUT:
                yield last

    def read(self, stored: Stored) -> bytes | None:
        """Return an encoded record; None where it is damaged or gone."""
        try:
            with open_regular(self._paths[stored.file]) as file:
                whole = os.pread(file.fileno(), stored.size, stored.offset)
        except OSError:
            return None
        return _content(whole) if len(whole) == stored.size else None


def _content(whole: bytes) -> bytes | None:
    """Return the encoded record in an entry; None where it is damaged."""
    if len(whole) < ENTRY.size:
        return None
    length, checksum = ENTRY.unpack_from(whole)
    encoded = whole[ENTRY.size :]
    return encoded if len(encoded) == length and zlib.crc32(encoded) == checksum else None


def _first_of(beginning: bytes, at: int, number: int, size: int) -> tuple[str, Stored] | None:
    """Return key and place of the entry that begins so at byte `at` of file `number`; None where it is not whole."""
    if len(beginning) < ENTRY.size + HEAD.size:
        return None
    length, _ = ENTRY.unpack_from(beginning)
    rollout_id, key_bytes, _, _, _, tokens, _ = HEAD.unpack_from(beginning, ENTRY.size)
    first = ENTRY.size + HEAD.size
    if length < HEAD.size + key_bytes or at + ENTRY.size + length > size or not 0 < key_bytes <= LONGEST_KEY:
        return None
    if tokens > MOST_RATIO * length or length > LARGEST_ENTRY:
        return None
    try:
        key = beginning[first : first + key_bytes].decode("ascii")
    except UnicodeDecodeError:
        return None
    return key, Stored(rollout_id, number, at, ENTRY.size + length, tokens)


def archives_in(path: Path) -> list[Archive]:
    """Return the archives that a path names: a run directory, an archive, a checkpoint or a store, the newest first.

    Raises ArchiveError where there is none.
    """
    for directory in (path, path / FOLDER):
        if os.path.exists(directory / ABOUT_FILE):
            return [read_archive(directory)]
    if os.path.exists(path / CHECKPOINT_STATE):
        return [read_checkpoint(path)]
    found = in_store(path)
    if not found:
        raise ArchiveError(f"{path} is no run directory, checkpoint or store with responses")
    return found


def in_store(path: Path) -> list[Archive]:
    """Return the archives below a store, the newest first; those that cannot be read are left out."""
    found = []
    for _, directory in _directories(path):
        try:
            found.append(read_archive(directory))
        except ArchiveError:
            continue
    return sorted(found, key=lambda one: (-one.about.started, str(one.directory)))


def below(path: Path) -> list[Archive]:
    """Return the archives of a run, a store or a directory of runs, the newest first. Raises ArchiveError for none."""
    try:
        return archives_in(path)
    except ArchiveError:
        found = []
        for archive in sorted(path.glob(f"*/{FOLDER}/{ABOUT_FILE}")):
            try:
                found.append(read_archive(archive.parent))
            except ArchiveError:
                continue
        if not found:
            raise
        return sorted(found, key=lambda one: (-one.about.started, str(one.directory)))


def _directories(path: Path) -> list[tuple[float, Path]]:
    """Return the directories in a directory, each with the time of its last change; none where they cannot be seen."""
    found: list[tuple[float, Path]] = []
    try:
        entries = list(os.scandir(path))
    except OSError:
        return []
    for one in entries:
        # A link may lead nowhere, and a directory may go meanwhile.
        with contextlib.suppress(OSError):
            if one.is_dir():
                found.append((one.stat().st_mtime, Path(one.path)))
    return found


def beside(run_directory: Path, tokenizer: str, most: int) -> list[Archive]:
    """Return the newest archives of runs in the same directory as this one, of one tokenizer; at most `most`.

    A control plane's runs have a directory each, with one of each attempt (api/launch/actions.py).
    """
    places = [run_directory.parent]
    if ATTEMPT.fullmatch(run_directory.name):
        places = [one for one in run_directory.parent.parent.glob("*") if one.is_dir()]
    candidates = [one for place in places for one in _directories(place) if one[1] != run_directory]
    found: list[Archive] = []
    for _, path in sorted(candidates, reverse=True)[:MOST_LOOKED_AT]:
        if len(found) == most:
            break
        try:
            archive = read_archive(path / FOLDER)
        except ArchiveError:
            continue
        if archive.about.tokenizer == tokenizer:
            found.append(archive)
    return found


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's vocabulary and special tokens: equal ones give tokens the same meaning."""
    import hashlib

    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    text = json.dumps([vocabulary, special], ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
