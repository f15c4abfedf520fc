"""`rhyme compare`: two records compared, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.cli import compare
from rhyme_openrlhf.telemetry.event_log import EventLog
from tests.telemetry.test_two_runs import records


def record(path: Path, speeds: list[float]) -> Path:
    path.mkdir(parents=True)
    log = EventLog(path / "events.jsonl")
    for one in records(speeds):
        log.write(one.event, one.source)
    log.close()
    return path


def test_two_records_are_compared_by_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = record(tmp_path / "one", [100, 100, 100, 101, 100, 99])
    two = record(tmp_path / "two", [9, 9, 150, 150, 301, 300])
    assert compare.main([str(one), str(two)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["2", "2"], ["3", "2"], ["all", "4"]]
    assert lines[-1].startswith(
        "two against one: Rollouts are faster (1.41 to 3.19 times as fast), whole steps are 1.91 times"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["one"], "give a directory and a command"),
        (["one", "two"], "has no record of a run"),
        (["one", "two", "--", "rhyme", "demo"], "give one new directory"),
        (["new", "--", "rhyme", "serve"], "`rhyme train` or `rhyme demo`"),
        (["new", "--"], "`rhyme train` or `rhyme demo`"),
        ([".", "--", "rhyme", "demo"], "exists: name a new directory"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_start(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    assert compare.main(argv) == 2
    assert said in capsys.readouterr().err


def test_short_runs_say_how_many_steps_are_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = record(tmp_path / "one", [100] * 4), record(tmp_path / "two", [200] * 2)
    assert compare.main([str(one), str(two)]) == 2
    assert "let both train 5 or more" in capsys.readouterr().err
    three = record(tmp_path / "three", [200] * 3)
    assert compare.main([str(one), str(three)]) == 0
    assert "at least 5 of both runs" in capsys.readouterr().out


def test_both_runs_differ_in_what_was_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command[3:])
        record(Path(command[command.index("--run.dir") + 1]), [100.0 * len(started)] * 6)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    argv = [str(tmp_path / "ab"), "--first", "--no-histospec.enable --x 'a b'", "--", "rhyme", "train", "--y", "1"]
    assert compare.main(argv) == 0
    first, second = ([word for word in one if str(tmp_path) not in word] for one in started)
    assert [word for word in first if word not in second] == ["--no-histospec.enable", "--x", "a b"]
    assert second[:5] == ["train", "--history.earlier", "none", "--y", "1"]
    assert "with against without: Rollouts are 2.00 times as fast" in capsys.readouterr().out


def test_a_run_that_fails_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([3])
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, next(codes)))
    assert compare.main([str(tmp_path / "ab"), "--", "rhyme", "demo"]) == 3
