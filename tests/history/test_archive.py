"""A run's archive: whole entries are read, damaged ones are not, and only its user can read it."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.history import archive as module
from rhyme_openrlhf.history.archive import ArchiveError, ArchiveReader, ArchiveWriter, archives_in, beside, in_store
from rhyme_openrlhf.history.journal import ENTRY, NO_RUN, entry, write_entries
from rhyme_openrlhf.history.record import Record, decode, encode
from tests.examples import examples
from tests.history.archives import LIMIT, about, archive, record

FILE = "worker-0.responses"
records = st.builds(
    lambda key, step, tokens: record(key, step, tokens),
    st.sampled_from(["a" * 32, "b" * 32, "b" * 32 + "-1"]), st.integers(1, 9), st.lists(st.integers(0, 9), max_size=9),
)  # fmt: skip


def read_all(reader: ArchiveReader) -> list[bytes]:
    return [encoded for _, stored in reader.new() if (encoded := reader.read(stored)) is not None]


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


# --- finding archives


def test_a_path_is_a_run_an_archive_a_checkpoint_or_a_store(tmp_path: Path) -> None:
    run = archive(tmp_path / "runs" / "one" / "history" / "archive")
    assert archives_in(tmp_path / "runs" / "one") == archives_in(run.directory) == [run]
    older = archive(tmp_path / "store" / "x", run="older", started=1)
    newer = archive(tmp_path / "store" / "y", run="newer", started=2)
    (tmp_path / "store" / "other").mkdir()
    assert archives_in(tmp_path / "store") == in_store(tmp_path / "store") == [newer, older]
    tag = tmp_path / "_rhyme" / "global_step2"
    tag.mkdir(parents=True)
    one = encode(record("a" * 32, 2, [1, 2]))
    write_entries(tag / "history-0-of-1", NO_RUN, [encode(Record("a" * 32, -1, earlier=((1, 2.0),))), one])
    (tag / "state.json").write_text(json.dumps({"tokenizer": "t"}))
    (found,) = archives_in(tag)
    assert (found.about.tokenizer, read_all(ArchiveReader(found))) == ("t", [one])


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": 2}', '{"format": 1}', '{"format": 1, "run": "x"}'])
def test_a_description_that_is_damaged_is_named(tmp_path: Path, content: str) -> None:
    archive(tmp_path / "store" / "a")
    (tmp_path / "store" / "a" / "run.json").write_text(content)
    with pytest.raises(ArchiveError, match=r"run\.json"):
        archives_in(tmp_path / "store" / "a")
    assert in_store(tmp_path / "store") == []


def test_what_has_no_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no run directory, checkpoint or store"):
        archives_in(tmp_path)
    with pytest.raises(ArchiveError, match="nowhere"):
        archives_in(tmp_path / "nowhere")


def test_runs_beside_are_the_newest_of_the_same_tokenizer(tmp_path: Path) -> None:
    for number in range(4):
        directory = tmp_path / f"run-{number}"
        archive(directory / "history" / "archive", run=str(number))
        os.utime(directory, (number, number))
    other = ArchiveWriter(tmp_path / "other" / "history" / "archive", about("other", "another"), 0, LIMIT)
    other.close()
    found = beside(tmp_path / "run-2", about().tokenizer, 2)
    assert [one.about.run for one in found] == ["3", "1"]


def test_attempts_of_a_control_planes_runs_are_beside_each_other(tmp_path: Path) -> None:
    for number, name in enumerate(("one/attempt-1", "one/attempt-2", "two/attempt-1", "three/attempt-1")):
        archive(tmp_path / name / "history" / "archive", run=name)
        os.utime(tmp_path / name, (number, number))
    found = beside(tmp_path / "two" / "attempt-1", about().tokenizer, 9)
    assert [one.about.run for one in found] == ["three/attempt-1", "one/attempt-2", "one/attempt-1"]


def test_a_records_tokens_come_back(tmp_path: Path) -> None:
    made = archive(tmp_path / "a", record("a" * 32, 3, [1, 2, 3], [4]))
    reader = ArchiveReader(made)
    ((key, stored),) = reader.new()
    found = decode(reader.read(stored) or b"")
    assert (key, stored.rollout_id, stored.tokens) == ("a" * 32, 3, 8)
    assert [list(piece.tokens) for piece in found.pieces] == [[1, 2, 3], [4]]


def test_pipes_loops_and_odd_descriptions_beside_a_run_are_passed_over(tmp_path: Path) -> None:
    """Another user of the directory must not make a run wait, or fail."""
    good = archive(tmp_path / "good" / module.FOLDER, record("a" * 32, 1, [1]))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    odd = {"deep": "[" * 100_000, "late": '{"format": 1, "run": "r", "tokenizer": "t", "model": "", "started": 1e999}'}
    for name, text in odd.items():
        (tmp_path / name / module.FOLDER).mkdir(parents=True)
        (tmp_path / name / module.FOLDER / "run.json").write_text(text)
    (tmp_path / "pipe" / module.FOLDER).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe" / module.FOLDER / "run.json")
    assert [one.directory for one in beside(tmp_path / "mine", good.about.tokenizer, 9)] == [good.directory]
    os.mkfifo(good.directory / "worker-1.responses")
    assert len(read_all(ArchiveReader(good))) == 1


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
