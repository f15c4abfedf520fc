"""A run's archive: whole entries are read, damaged ones are not, and only its user can read it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.history import archive as module
from rhyme_openrlhf.history.archive import ArchiveReader, ArchiveWriter, delete, goes_on
from rhyme_openrlhf.history.journal import ENTRY, entry
from rhyme_openrlhf.history.record import Record, decode, encode
from rhyme_openrlhf.history.store import archives_in
from tests.examples import examples
from tests.history.archives import LIMIT, about, archive, read_all, record

FILE = "worker-0.responses"
records = st.builds(
    lambda key, step, tokens: record(key, step, tokens),
    st.sampled_from(["a" * 32, "b" * 32, "b" * 32 + "-1"]), st.integers(1, 9), st.lists(st.integers(0, 9), max_size=9),
)  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(records, max_size=6), st.data())
def test_a_torn_end_costs_only_what_was_being_written(
    tmp_path_factory: pytest.TempPathFactory, written: list[Record], data: st.DataObject
) -> None:
    """Cut the file anywhere, also in its header: readers see the whole entries, and the writer goes on behind them."""
    directory = tmp_path_factory.mktemp("archive") / "a"
    archive(directory, *written)
    path = directory / FILE
    sizes = [module.HEADER.size]
    for one in written:
        sizes.append(sizes[-1] + len(entry(encode(one))))
    cut = data.draw(st.integers(0, sizes[-1]))
    zeros = data.draw(st.integers(0, 40))
    path.write_bytes(path.read_bytes()[:cut] + bytes(zeros))
    whole = [encode(one) for one, end in zip(written, sizes[1:], strict=True) if end <= cut]
    reader = ArchiveReader(archives_in(directory)[0])
    if cut >= sizes[0]:
        assert read_all(reader) == whole
        again = ArchiveWriter(directory, about(), 0, LIMIT)
        later = encode(record("c" * 32, 10, [1]))
        again.add(later)
        # The reader goes on where it was, and a new one reads all.
        assert read_all(reader) == [later]
        assert read_all(ArchiveReader(archives_in(directory)[0])) == [*whole, later]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(records, min_size=1, max_size=4), st.data())
def test_a_damaged_byte_is_never_read_as_a_response(
    tmp_path_factory: pytest.TempPathFactory, written: list[Record], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("archive") / "a"
    archive(directory, *written)
    damaged = bytearray((directory / FILE).read_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    (directory / FILE).write_bytes(damaged)
    assert set(read_all(ArchiveReader(archives_in(directory)[0]))) <= set(map(encode, written))


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_end_and_raise_nothing(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    directory = tmp_path_factory.mktemp("archive") / "a"
    path = directory / FILE
    archive(directory)
    path.write_bytes(path.read_bytes() + content)
    reader = ArchiveReader(archives_in(directory)[0])
    for encoded in read_all(reader):
        assert entry(encoded) in path.read_bytes()


def test_a_reader_sees_what_comes_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path / "a", about(), 0, LIMIT)
    reader = ArchiveReader(archives_in(tmp_path / "a")[0])
    assert read_all(reader) == []
    first, second = encode(record("a" * 32, 1, [1, 2])), encode(record("a" * 32, 2, [3]))
    writer.add(first)
    assert read_all(reader) == [first]
    writer.add(second)
    # A worker that joins has a file of its own.
    ArchiveWriter(tmp_path / "a", about(), 1, LIMIT).add(first)
    assert read_all(reader) == [second, first]


def test_an_archive_that_is_deleted_while_it_is_read_is_absent(tmp_path: Path) -> None:
    archive(tmp_path / "a", record("a" * 32, 1, [1, 2]))
    reader = ArchiveReader(archives_in(tmp_path / "a")[0])
    ((_, stored),) = reader.new()
    shutil.rmtree(tmp_path / "a")
    assert reader.read(stored) is None
    assert list(reader.new()) == []
    assert reader.refused == ""


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    os.umask(os.umask(0))
    archive(tmp_path / "store" / "a", record("a" * 32, 1, [1]))
    assert stat.S_IMODE((tmp_path / "store" / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "store" / "a" / FILE).stat().st_mode) == 0o600


def test_what_does_not_fit_is_left_out_and_the_first_epochs_stay(tmp_path: Path) -> None:
    encoded = [encode(record("a" * 32, step, list(range(50)))) for step in range(1, 5)]
    writer = ArchiveWriter(tmp_path / "a", about(), 0, module.HEADER.size + 2 * len(entry(encoded[0])))
    assert [writer.add(one) for one in encoded] == [True, True, False, False]
    assert read_all(ArchiveReader(archives_in(tmp_path / "a")[0])) == encoded[:2]


def test_a_full_disk_is_the_writers_error(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path / "a", about(), 0, LIMIT)
    writer.close()
    os.symlink("/dev/full", tmp_path / "full")
    writer._file = os.open(tmp_path / "full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space"):
        writer.add(encode(record("a" * 32, 1, [1])))


def test_an_entry_with_impossible_sizes_ends_its_file(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record("a" * 32, 1, [1]))
    path = tmp_path / "a" / FILE
    whole = path.read_bytes()
    for length in (0, 5, 2**63, 2**64 - 1):
        path.write_bytes(whole + ENTRY.pack(length, 0) + bytes(200))
        assert len(read_all(ArchiveReader(made))) == 1, length


def test_a_records_tokens_come_back(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record("a" * 32, 3, [1, 2, 3], [4]))
    reader = ArchiveReader(made)
    ((key, stored),) = reader.new()
    found = decode(reader.read(stored) or b"")
    assert (key, stored.rollout_id, stored.tokens) == ("a" * 32, 3, 8)
    assert [list(piece.tokens) for piece in found.pieces] == [[1, 2, 3], [4]]


def test_workers_that_start_together_describe_one_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees no description, and writes its own in one piece."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self.name != module.ABOUT_FILE and exists(self))
    writers = [ArchiveWriter(tmp_path, about(), number, LIMIT) for number in range(3)]
    for writer in writers:
        writer.close()
    assert module.read_archive(tmp_path).about == about()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.json",
        *(f"worker-{n}.responses" for n in range(3)),
    ]


# --- whether its run goes on


def test_a_run_goes_on_until_its_writer_closes_or_dies(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path / "a", about(), 0, module.HEADER.size)
    (made,) = archives_in(tmp_path / "a")
    # Also one whose archive is full.
    assert not writer.add(encode(record("a" * 32, 1, [1]))) and writer.ended
    assert goes_on(made)
    writer.close()
    assert not goes_on(made)
    child = os.fork()
    if child == 0:
        ArchiveWriter(tmp_path / "a", about(), 0, LIMIT)
        os._exit(0)
    os.waitpid(child, 0)
    assert not goes_on(made)


def test_where_there_are_no_locks_every_run_may_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    made = archive(tmp_path / "a", record("a" * 32, 1, [1]))
    assert goes_on(made)


def test_deleting_takes_an_archives_own_files_only(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record("a" * 32, 1, [1]))
    tag = tmp_path / "a" / "_rhyme" / "global_step1"
    tag.mkdir(parents=True)
    (tag / "history-0-of-1").write_bytes(b"a checkpoint's")
    assert delete(made) > 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["history-0-of-1"]
    other = archive(tmp_path / "b", record("a" * 32, 1, [1]))
    delete(other)
    assert not (tmp_path / "b").exists()


def test_behind_a_torn_entry_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers would never see it: a disk that was full for a moment must not cost a gigabyte for nothing."""
    writer = ArchiveWriter(tmp_path / "a", about(), 0, LIMIT)
    writer.add(encode(record("a" * 32, 1, [1])))
    write, wrote = os.write, []

    def full(file: int, content: bytes) -> int:
        if wrote:
            raise OSError(28, "No space left on device")
        wrote.append(write(file, content[:5]))
        return wrote[0]

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        writer.add(encode(record("a" * 32, 2, [2])))
    monkeypatch.undo()
    assert not writer.add(encode(record("a" * 32, 3, [3])))
    assert len(read_all(ArchiveReader(archives_in(tmp_path / "a")[0]))) == 1
