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
- A writer holds its file's lock as long as it may write, where the file system has locks. So `goes_on` is known.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
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
# Bytes of what is read whole: a description, a checkpoint's state, an entry. Others are held to be damaged.
LARGEST_ABOUT, LARGEST_STATE, LARGEST_ENTRY = 1 << 16, 1 << 28, 1 << 30
# Keys of prompts have 32 bytes, and a few more for a round.
LONGEST_KEY = 96


class ArchiveError(Exception):
    """A directory holds no archive that can be read; the message says which, and why."""


@dataclass(frozen=True)
class About:
    """The run that wrote an archive: its name, its tokenizer's fingerprint, its model, and when it started (unix).

    `uid`: its id in a control plane, or "". `data`: its data sets, as they were named.
    """

    run: str
    tokenizer: str
    model: str = ""
    started: float = 0.0
    uid: str = ""
    data: str = ""


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
        names = str(found["run"]), str(found["tokenizer"]), str(found["model"])
        about = About(*names, float(found["started"]), str(found.get("uid", "")), str(found.get("data", "")))
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
        self.ended = False
        """Whether a record did not fit or could not be written; none is from then on."""
        self._limit = limit_bytes
        directory.mkdir(mode=ONLY_MINE, parents=True, exist_ok=True)
        directory.chmod(ONLY_MINE)
        if not (directory / ABOUT_FILE).exists():
            # Workers start together, and each writes the same.
            write_json(directory / ABOUT_FILE, {"format": FORMAT, **asdict(about)})
        path = directory / RESPONSES.replace("*", str(number))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, MINE_TO_WRITE)
        # Nobody waits for a lock: one file has one writer. A file system without locks says so to who asks.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
        if self.ended or self._size + ENTRY.size + len(encoded) > self._limit:
            self.ended = True
            return False
        whole = entry(encoded)
        written = 0
        # Behind an entry that is not whole, readers see no other.
        self.ended = True
        while written < len(whole):
            written += os.write(self._file, whole[written:])
        self.ended = False
        self._size += written
        return True

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        os.close(self._file)


def goes_on(archive: Archive) -> bool:
    """Return whether a run still writes to the archive, or may: without locks of the file system nothing tells."""
    for path in archive.files:
        try:
            # Opened to write, because some file systems lock no other file.
            file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(file)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def delete(archive: Archive) -> int:
    """Delete an archive's own files, and its directory if nothing else is in it; return the bytes. Raises OSError."""
    deleted = 0
    # The description goes last: what is left after a kill is still an archive.
    for path in (*archive.files, archive.directory / ABOUT_FILE):
        with contextlib.suppress(FileNotFoundError):
            deleted += path.lstat().st_size
            path.unlink()
    with contextlib.suppress(OSError):
        archive.directory.rmdir()
    return deleted


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


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's vocabulary and special tokens: equal ones give tokens the same meaning."""
    import hashlib

    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    text = json.dumps([vocabulary, special], ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
