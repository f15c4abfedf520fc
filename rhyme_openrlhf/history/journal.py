"""A history shard in a file: a restarted worker reads its history from it, and a checkpoint holds history in this form.

The file, in this order (integers little-endian):
- magic, format version, and a token that identifies the file's owner;
- one entry for each record: the size and CRC-32 of the encoded record, and that record itself (history/record.py).

Invariants:
- An entry counts only if it is whole. Reading ends before the first entry that is torn or damaged (a process killed
  while it wrote), and writing continues from there.
- A file is begun, and shortened, under another name and then renamed, so no reader ever sees it half-written.
- A file with another token (an earlier run's) is not read.

One caller at a time: nothing here locks.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rhyme_openrlhf.history.record import HEAD
from rhyme_openrlhf.history.shard import HistoryShard

MAGIC = b"RHYMEJNL"
VERSION = 2
TOKEN_BYTES = 16
HEADER = struct.Struct(f"<8sI{TOKEN_BYTES}s")
ENTRY = struct.Struct("<QI")
# A checkpoint's history belongs to no run.
NO_RUN = bytes(TOKEN_BYTES)
# A journal is shortened when it is twice the size that it needs. Below this size, shortening is not worth the writing.
SHORTEN_FROM_BYTES = 1024**2


class JournalError(Exception):
    """An error: a file is not a history journal of this version and owner. The message says which file, and why."""


def write_entries(path: Path, token: bytes, encoded: Iterable[bytes]) -> int:
    """Write a whole file of encoded records, atomically and to the disk; return its size in bytes. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, token))
            for one in encoded:
                file.write(entry(one))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        partial.rename(path)
    except OSError:
        # On a full disk, the next try needs the space that this partial file takes.
        partial.unlink(missing_ok=True)
        raise
    return size


def read_entries(path: Path, token: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the encoded records of a file, each with the file's size in bytes up to the record's end.

    Raises JournalError if the file is no journal of this version or has another token; OSError if it cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise JournalError(f"{path} is not a history journal")
        _, version, found = HEADER.unpack(header)
        if version != VERSION:
            raise JournalError(f"{path} is a history journal of version {version}, this code reads version {VERSION}")
        if found != token:
            raise JournalError(f"{path} is another run's history journal")
        size = os.fstat(file.fileno()).st_size
        good = HEADER.size
        while good + ENTRY.size <= size:
            length, checksum = ENTRY.unpack(file.read(ENTRY.size))
            # Never allocate memory for a damaged length. A file that ends in zeros (a machine that crashed) has entries
            # of no bytes, whose checksum fits.
            encoded = file.read(length) if HEAD.size <= length <= size - good - ENTRY.size else b""
            if not encoded or len(encoded) != length or zlib.crc32(encoded) != checksum:
                return
            good += ENTRY.size + length
            yield encoded, good


def entry(encoded: bytes) -> bytes:
    """Return an encoded record as an entry of a file."""
    return ENTRY.pack(len(encoded), zlib.crc32(encoded)) + encoded


class JournaledShard:
    """A shard whose records are also in the file at `path`.

    If the file exists and has this `token`, the shard is read from it. Otherwise the shard begins with the encoded
    records that `first` returns, and they are written to a new file. `rollouts` has the same meaning as in
    HistoryShard. Raises OSError if the file cannot be written.
    """

    def __init__(self, path: Path, token: bytes, first: Callable[[], Iterable[bytes]], rollouts: int = 1) -> None:
        self.shard = HistoryShard(rollouts)
        self._path = path
        self._token = token
        self.replayed = True
        """Whether there was a file to read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._bytes = self._replay()
            # The exact number of live bytes is unknown; this is a lower bound.
            self._live_bytes = self.shard.data_bytes
        except (FileNotFoundError, JournalError):
            self.replayed = False
            for encoded in first():
                self.shard.add(encoded)
            self._bytes = self._live_bytes = write_entries(path, token, self.shard.encoded())
        self._open()

    def _replay(self) -> int:
        """Read the file back into the shard, cut off a damaged end, and return the number of good bytes."""
        good = HEADER.size
        for encoded, good in read_entries(self._path, self._token):  # noqa: B007
            self.shard.add(encoded)
        os.truncate(self._path, good)
        return good

    def _open(self) -> None:
        # Unbuffered, so that written records survive the death of this process.
        self._file = self._path.open("ab", buffering=0)

    def add(self, encoded: bytes) -> bool:
        """Keep an encoded record, in memory and then in the file; return False for one that the shard ignores.

        Raises OSError when the file cannot be written. The shard is still right then, and the caller must give up the
        file (`close`).
        """
        if not self.shard.add(encoded):
            return False
        self._write(entry(encoded))
        if self._bytes > max(2 * self._live_bytes, SHORTEN_FROM_BYTES):
            self._file.close()
            self._bytes = self._live_bytes = write_entries(self._path, self._token, self.shard.encoded())
            self._open()
        return True

    def _write(self, entries: bytes) -> None:
        written = 0
        while written < len(entries):
            written += self._file.write(entries[written:])
        self._bytes += written

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        self._file.close()
