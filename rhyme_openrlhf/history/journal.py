"""A history shard in a file: what a restarted worker reads its history from, and how a checkpoint holds it.

The file (integers little-endian): magic, format version and a token that says whose file it is; then one entry a
record: size and CRC-32 of what follows, rollout id, prompt key, lengths, and each piece's reward and tokens.

Invariants:
- An entry counts only if it is whole: reading ends before the first that is torn or damaged (a process killed while it
  wrote), and writing goes on from there.
- A file is begun, and shortened, under another name and renamed, so it is never seen half-written.
- A file with another token (an earlier run's) is not read.

One caller at a time: nothing here locks.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from rhyme_openrlhf.history.index import Piece, token_array
from rhyme_openrlhf.history.shard import HistoryShard, Record

MAGIC = b"RHYMEJNL"
VERSION = 1
TOKEN_BYTES = 16
HEADER = struct.Struct(f"<8sI{TOKEN_BYTES}s")
ENTRY = struct.Struct("<QI")
RECORD = struct.Struct("<qIII")
PIECE = struct.Struct("<dII")
# A checkpoint's history belongs to no run.
NO_RUN = bytes(TOKEN_BYTES)
# A journal is shortened when it is twice what it has to hold; below this, shortening saves nothing worth the writing.
SHORTEN_FROM_BYTES = 1024**2


class JournalError(Exception):
    """A file is not a history journal of this version; the message says which file and what it is instead."""


def write_records(path: Path, token: bytes, records: Iterable[Record]) -> int:
    """Write a whole file, in one piece and to the disk; returns its bytes."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, token))
        for record in records:
            file.write(_entry(record))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    partial.rename(path)
    return size


def read_records(path: Path, token: bytes) -> tuple[list[Record], int] | None:
    """The records of a file and the bytes up to the end of the last whole one; None if its token is another.

    Raises JournalError if it is no journal of this version, OSError if it cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise JournalError(f"{path} is not a history journal")
        _, version, found = HEADER.unpack(header)
        if version != VERSION:
            raise JournalError(f"{path} is a history journal of version {version}, this code reads version {VERSION}")
        if found != token:
            return None
        size = os.fstat(file.fileno()).st_size
        records, good = [], HEADER.size
        while good + ENTRY.size <= size:
            length, checksum = ENTRY.unpack(file.read(ENTRY.size))
            # A damaged length must not be asked of the memory.
            payload = file.read(length) if length <= size - good - ENTRY.size else b""
            if len(payload) != length or zlib.crc32(payload) != checksum:
                break
            records.append(_decoded(payload))
            good += ENTRY.size + length
        return records, good


def _entry(record: Record) -> bytes:
    key = record.prompt_key.encode("utf-8")
    parts = [
        RECORD.pack(record.rollout_id, len(key), len(record.lengths), len(record.pieces)),
        key,
        np.asarray(record.lengths, dtype="<i8").tobytes(),
    ]
    for piece in record.pieces:
        context, tokens = token_array(piece.context), token_array(piece.tokens)
        parts += [PIECE.pack(piece.reward, context.size, tokens.size)]
        parts += [context.astype("<i4").tobytes(), tokens.astype("<i4").tobytes()]
    payload = b"".join(parts)
    return ENTRY.pack(len(payload), zlib.crc32(payload)) + payload


def _decoded(payload: bytes) -> Record:
    rollout_id, key_bytes, lengths, pieces = RECORD.unpack_from(payload)
    at = RECORD.size + key_bytes
    key = payload[RECORD.size : at].decode("utf-8")
    found = np.frombuffer(payload, dtype="<i8", count=lengths, offset=at).tolist()
    at += 8 * lengths
    read = []
    for _ in range(pieces):
        reward, context, tokens = PIECE.unpack_from(payload, at)
        at += PIECE.size
        both = np.frombuffer(payload, dtype="<i4", count=context + tokens, offset=at)
        at += both.nbytes
        read.append(Piece(both[:context], both[context:], reward))
    return Record(key, rollout_id, tuple(read), tuple(found))


class JournaledShard:
    """A shard whose records are also in the file at `path`.

    If the file is there with this `token`, the shard is what the file says; otherwise it begins with what `first`
    returns, and a new file with that. Raises OSError if the file cannot be written.
    """

    def __init__(self, path: Path, token: bytes, first: Callable[[], Iterable[Record]]) -> None:
        self.shard = HistoryShard()
        self._path = path
        self._token = token
        self._live: dict[str, tuple[int, int]] = {}
        self._live_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        replayed = self._replay()
        if replayed is None:
            for record in first():
                self._keep(record, len(_entry(record)))
            self._bytes = write_records(path, token, self.shard.records())
        else:
            self._bytes = replayed
        self._open()

    def _replay(self) -> int | None:
        """Read the file back into the shard; returns its good bytes, None if there is no such file of this run."""
        try:
            found = read_records(self._path, self._token)
        except (FileNotFoundError, JournalError):
            return None
        if found is None:
            return None
        records, good = found
        for record in records:
            self._keep(record, len(_entry(record)))
        os.truncate(self._path, good)
        return good

    def _open(self) -> None:
        # Unbuffered: what `record` wrote survives the death of this process.
        self._file = self._path.open("ab", buffering=0)

    def record(self, records: Sequence[Record]) -> None:
        """Keep records of a rollout, in memory and then in the file.

        Raises ValueError as the shard does, and OSError when the file cannot be written: the shard is right then, and
        the file is to be given up (`close`).
        """
        entries = [_entry(record) for record in records]
        kept = [entry for entry, record in zip(entries, records, strict=True) if self._keep(record, len(entry))]
        self._write(b"".join(kept))
        if self._bytes > max(2 * self._live_bytes, SHORTEN_FROM_BYTES):
            self._shorten()

    def _keep(self, record: Record, nbytes: int) -> bool:
        if not self.shard.record(record.prompt_key, record.rollout_id, record.pieces, record.lengths):
            return False
        rollout_id, before = self._live.get(record.prompt_key, (record.rollout_id, 0))
        kept = nbytes + (before if rollout_id == record.rollout_id else 0)
        self._live[record.prompt_key] = (record.rollout_id, kept)
        self._live_bytes += kept - before
        return True

    def _write(self, entries: bytes) -> None:
        written = 0
        while written < len(entries):
            written += self._file.write(entries[written:])
        self._bytes += written

    def _shorten(self) -> None:
        self._file.close()
        self._bytes = write_records(self._path, self._token, self.shard.records())
        self._open()

    def close(self) -> None:
        """Write no more."""
        self._file.close()
