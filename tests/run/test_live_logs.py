"""Copies of logs grow with their logs, of the run's own job alone."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from rhyme_openrlhf.run import live_logs
from rhyme_openrlhf.run.live_logs import LiveLogs

LIMIT_S = 60.0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "session", tmp_path / "run"
    source.mkdir()
    target.mkdir()
    return source, target


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_copy_grows_with_its_log(folders: tuple[Path, Path]) -> None:
    source, target = folders
    logs = LiveLogs(source, target, "01")
    (source / "worker-a-01-1.out").write_text(":actor_name:Engine\none\n")
    (source / "worker-b-ffffffff-2.out").write_text("")
    (source / "worker-c-02-3.out").write_text("another run\n")
    (source / "raylet.out").write_text("Ray's own\n")
    logs.copy()
    assert contents(target) == {"worker-a-01-1.out": ":actor_name:Engine\none\n"}
    with (source / "worker-a-01-1.out").open("a") as file:
        file.write("two\n")
    (source / "worker-b-ffffffff-2.out").write_text(":job_id:01\nearly\n")
    logs.copy()
    logs.copy()
    grown = {"worker-a-01-1.out": ":actor_name:Engine\none\ntwo\n", "worker-b-ffffffff-2.out": ":job_id:01\nearly\n"}
    assert contents(target) == grown
    # A log that was begun anew, and one that Ray has removed.
    (source / "worker-a-01-1.out").write_text("new\n")
    (source / "worker-b-ffffffff-2.out").unlink()
    logs.copy()
    assert contents(target) == {**grown, "worker-a-01-1.out": "new\n"}
    shutil.rmtree(source)
    logs.copy()


def test_a_disk_that_takes_no_more_costs_the_copies_alone(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folders
    for name in ("worker-a-01-1.out", "worker-b-01-2.out"):
        (source / name).write_text(name)
    copy_rest = live_logs.copy_rest

    def full(log: Path, copy: Path, most: int) -> None:
        if "worker-a" in log.name:
            raise OSError("No space left on device")
        copy_rest(log, copy, most)

    monkeypatch.setattr(live_logs, "copy_rest", full)
    LiveLogs(source, target, "01").copy()
    assert contents(target) == {"worker-b-01-2.out": "worker-b-01-2.out"}


def test_it_copies_until_it_is_closed(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folders
    monkeypatch.setattr(live_logs, "LOOK_SECONDS", 0.01)
    logs = LiveLogs(source, target, "01")
    logs.start()
    (source / "worker-a-01-1.out").write_text("one\n")
    end = time.monotonic() + LIMIT_S
    while contents(target) != {"worker-a-01-1.out": "one\n"}:
        assert time.monotonic() < end
        time.sleep(0.01)
    logs.close()
    (source / "worker-a-01-1.out").write_text("one\ntwo\n")
    time.sleep(0.05)
    assert contents(target) == {"worker-a-01-1.out": "one\n"}


def test_a_copy_leaves_room_on_the_disk_and_takes_a_piece_at_a_time(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = folders
    monkeypatch.setattr(live_logs, "AT_ONCE", 3)
    (source / "worker-a-01-1.out").write_text("abcdef\n")
    (source / "worker-odd.out").write_text("of no job\n")
    logs = LiveLogs(source, target, "01")
    logs.copy()
    assert contents(target) == {"worker-a-01-1.out": "abc"}
    monkeypatch.setattr(live_logs, "ROOM", 2**80)
    logs.copy()
    assert contents(target) == {"worker-a-01-1.out": "abc"}
    monkeypatch.setattr(live_logs, "ROOM", 0)
    logs.copy()
    logs.copy()
    assert contents(target) == {"worker-a-01-1.out": "abcdef\n"}
