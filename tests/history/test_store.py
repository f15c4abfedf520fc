"""The places where runs find archives, and which of them are deleted by themselves."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from rhyme_openrlhf.history import archive as archives
from rhyme_openrlhf.history.archive import ArchiveError, ArchiveReader, ArchiveWriter, delete
from rhyme_openrlhf.history.journal import NO_RUN, write_entries
from rhyme_openrlhf.history.record import Record, encode
from rhyme_openrlhf.history.store import MOST_RUNS, archives_in, below, beside, in_store, keep_newest
from tests.history.archives import LIMIT, about, archive, read_all, record


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
    found = beside(tmp_path / "run-2", about(), 2)
    assert [one.about.run for one in found] == ["3", "1"]
    # Of another task in between, the runs with the same data come first.
    found = beside(tmp_path / "run-2", dataclasses.replace(about(), data="mine"), 2)
    assert [one.about.run for one in found] == ["3", "1"]
    mine = tmp_path / "mine" / "history" / "archive"
    ArchiveWriter(mine, dataclasses.replace(about("mine"), data="mine"), 0, LIMIT).close()
    os.utime(tmp_path / "mine", (0, 0))
    found = beside(tmp_path / "run-2", dataclasses.replace(about(), data="mine"), 2)
    assert [one.about.run for one in found] == ["mine", "3"]


def test_attempts_of_a_control_planes_runs_are_beside_each_other(tmp_path: Path) -> None:
    for number, name in enumerate(("one/attempt-1", "one/attempt-2", "two/attempt-1", "three/attempt-1")):
        archive(tmp_path / name / "history" / "archive", run=name)
        os.utime(tmp_path / name, (number, number))
    found = beside(tmp_path / "two" / "attempt-1", about(), 9)
    assert [one.about.run for one in found] == ["three/attempt-1", "one/attempt-2", "one/attempt-1"]


def test_pipes_loops_and_odd_descriptions_beside_a_run_are_passed_over(tmp_path: Path) -> None:
    """Another user of the directory must not make a run wait, or fail."""
    good = archive(tmp_path / "good" / archives.FOLDER, record("a" * 32, 1, [1]))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    odd = {"deep": "[" * 100_000, "late": '{"format": 1, "run": "r", "tokenizer": "t", "model": "", "started": 1e999}'}
    for name, text in odd.items():
        (tmp_path / name / archives.FOLDER).mkdir(parents=True)
        (tmp_path / name / archives.FOLDER / "run.json").write_text(text)
    (tmp_path / "pipe" / archives.FOLDER).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe" / archives.FOLDER / "run.json")
    assert [one.directory for one in beside(tmp_path / "mine", good.about, 9)] == [good.directory]
    os.mkfifo(good.directory / "worker-1.responses")
    assert len(read_all(ArchiveReader(good))) == 1


def test_a_control_planes_run_is_all_of_its_attempts(tmp_path: Path) -> None:
    for number in (1, 2):
        archive(tmp_path / "uid" / f"attempt-{number}" / "history" / "archive", run=str(number), started=number)
    (tmp_path / "uid" / "attempt-3").mkdir()
    assert [one.about.run for one in archives_in(tmp_path / "uid")] == ["2", "1"]


def test_archives_that_are_known_are_not_read_again(tmp_path: Path) -> None:
    known = {one.directory: one for one in [archive(tmp_path / "a"), archive(tmp_path / "gone")]}
    (tmp_path / "a" / "run.json").write_text("damaged since")
    delete(known[tmp_path / "gone"])
    new = archive(tmp_path / "b", started=2)
    assert in_store(tmp_path, known) == [new, known[tmp_path / "a"]]


def test_a_store_keeps_the_newest_runs_of_each_tokenizer(tmp_path: Path) -> None:
    for number in range(MOST_RUNS + 3):
        archive(tmp_path / f"run-{number}", record("a" * 32, 1, [1]), run=str(number), started=number)
    going = ArchiveWriter(tmp_path / "run-1", about("1"), 0, LIMIT)
    ArchiveWriter(tmp_path / "other", about("other", "another tokenizer", -1.0), 0, LIMIT).close()
    (tmp_path / "_rhyme" / "global_step2").mkdir(parents=True)
    (tmp_path / "run-0" / "file").write_text("a user's")
    assert keep_newest(tmp_path) == 2
    left = {one.about.run for one in in_store(tmp_path)}
    assert left == {str(number) for number in range(3, MOST_RUNS + 3)} | {"1", "other"}
    assert sorted(path.name for path in (tmp_path / "run-0").iterdir()) == ["file"]
    assert (tmp_path / "_rhyme" / "global_step2").is_dir()
    going.close()
    assert (keep_newest(tmp_path), keep_newest(tmp_path), keep_newest(tmp_path / "nowhere")) == (1, 0, 0)
    assert len(below(tmp_path)) == MOST_RUNS + 1
