"""Archives as runs leave them, made for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rhyme_openrlhf.history.archive import About, Archive, ArchiveReader, ArchiveWriter, read_archive
from rhyme_openrlhf.history.index import Piece
from rhyme_openrlhf.history.record import Record, encode

TOKENIZER = "the tokenizer"
LIMIT = 10**9


def about(run: str = "math", tokenizer: str = TOKENIZER, started: float = 1.0) -> About:
    return About(run, tokenizer, "a model", started)


def record(key: str, step: int, *responses: Sequence[int], reward: float = 1.0) -> Record:
    """Return the record of a prompt's responses in a step."""
    pieces = tuple(Piece([7, 7], list(tokens), reward) for tokens in responses)
    return Record(key, step, pieces, tuple(map(len, responses)))


def archive(directory: Path, *records: Record, run: str = "math", started: float = 1.0) -> Archive:
    """Write an archive of these records, of one worker."""
    writer = ArchiveWriter(directory, about(run, started=started), 0, LIMIT)
    for one in records:
        assert writer.add(encode(one))
    writer.close()
    return read_archive(directory)


def read_all(reader: ArchiveReader) -> list[bytes]:
    """Return the encoded records that came since the last call."""
    return [encoded for _, stored in reader.new() if (encoded := reader.read(stored)) is not None]
