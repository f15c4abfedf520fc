"""Files that several processes read are strict JSON, whole or not there."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry.run_directory import RunDirectoryError, make_run_directory, write_json


def test_numbers_that_are_not_finite_are_written_as_in_events(tmp_path: Path) -> None:
    content = {"max_mem": math.inf, "low": [-math.inf, (math.nan, 1.5)], "name": "x"}
    write_json(tmp_path / "config.json", content)

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    read = json.loads((tmp_path / "config.json").read_text(), parse_constant=refuse)
    assert read == {"max_mem": "inf", "low": ["-inf", ["nan", 1.5]], "name": "x"}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_runs_of_one_name_that_start_in_the_same_second_have_a_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [make_run_directory("", "demo", 0.0).path.name for _ in range(3)]
    assert made == [made[0], f"{made[0]}-2", f"{made[0]}-3"]
    # A directory that was asked for is no other.
    make_run_directory("mine", "demo", 0.0)
    with pytest.raises(RunDirectoryError, match="--run.dir mine is not empty"):
        make_run_directory("mine", "demo", 0.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="--run.dir file cannot be made"):
        make_run_directory("file", "demo", 0.0)


def test_a_disk_that_refuses_a_file_keeps_the_old_one_and_no_part_of_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "summary.json", {"step": 1})
    whole = Path.write_text

    def torn(path: Path, text: str) -> int:
        whole(path, text[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "summary.json", {"step": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"step": 1}
