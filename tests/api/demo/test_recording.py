"""Recordings: packed without names of the machine, moved in time with every duration kept, unpacked inside a folder."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.demo.demonstration import IN_EXPERIMENT, LIVE
from rhyme_openrlhf.api.demo.recording import RecordingError, move_run, moved, pack, read_rows, unpack
from rhyme_openrlhf.api.demo.synthetic_run import SyntheticRun, write_run_directory
from rhyme_openrlhf.telemetry.event_json import parse
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import EngineInterval, RunFinished, TrainStep


def test_what_is_packed_comes_back_with_names_replaced(tmp_path: Path) -> None:
    run = tmp_path / "made"
    write_run_directory(run, SyntheticRun(steps=2, engines=2))
    (run / "logs").mkdir()
    (run / "logs" / "driver.log").write_bytes(b"started in /secret/place\n\xff\n")
    (run / "logs" / "ray").symlink_to("/")
    (run / "samples").mkdir()
    (run / "samples" / "step-000001.jsonl").write_text("{}\n")
    (run / "history").mkdir()
    (run / "history" / "shard").write_text("not recorded")
    pack(tmp_path / "x.tar.xz", {"a name": run}, [("/secret", "/home"), ("place", "user")])
    into = tmp_path / "into"
    into.mkdir()
    (back,) = unpack(tmp_path / "x.tar.xz", into)
    assert back == into / "a name"
    assert (back / "logs" / "driver.log").read_text().startswith("started in /home/user\n")
    assert read_rows(back) == read_rows(run)
    names = {path.relative_to(back).as_posix() for path in back.rglob("*") if path.is_file()}
    assert names == {"config.json", "events.jsonl", "logs/driver.log", "samples/step-000001.jsonl"}


def test_a_moved_run_keeps_every_duration(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run_directory(run, SyntheticRun(steps=3, engines=2))
    before = list(read_events(run / "events.jsonl"))
    move_run(run, 2_000_000_000.0)
    after = list(read_events(run / "events.jsonl"))
    assert after[-1].time == 2_000_000_000.0
    shift = after[-1].time - before[-1].time
    for old, new in zip(before, after, strict=True):
        assert new.time == pytest.approx(old.time + shift, abs=1e-5)
        if isinstance(old.event, EngineInterval) and isinstance(new.event, EngineInterval):
            assert new.event.end - new.event.start == pytest.approx(old.event.end - old.event.start, abs=1e-5)
        else:
            assert new.event == old.event
    assert moved({"kind": "note", "time": 1.0}, 2.0) == {"kind": "note", "time": 3.0}


@pytest.mark.parametrize("name", ["../out/events.jsonl", "/tmp/out/events.jsonl"])
def test_an_archive_writes_nowhere_else(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "x.tar.xz", "w:xz") as tar:
        about = tarfile.TarInfo(name)
        about.size = 2
        tar.addfile(about, io.BytesIO(b"{}"))
    (tmp_path / "into").mkdir()
    with pytest.raises(RecordingError):
        unpack(tmp_path / "x.tar.xz", tmp_path / "into")
    assert not (tmp_path / "out").exists()


def test_an_archive_makes_no_links(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.xz", "w:xz") as tar:
        about = tarfile.TarInfo("run/events.jsonl")
        about.type, about.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(about)
    (tmp_path / "into").mkdir()
    with pytest.raises(RecordingError, match="'run/events.jsonl', which is no file below its folder"):
        unpack(tmp_path / "x.tar.xz", tmp_path / "into")
    assert not list((tmp_path / "into").rglob("events.jsonl"))


def test_the_recording_is_whole_small_and_names_no_machine(tmp_path: Path) -> None:
    assert embedded.RECORDING.stat().st_size < 1_500_000
    runs = {run.name: run for run in unpack(embedded.RECORDING, tmp_path)}
    assert LIVE in runs
    compared = [name for name in runs if IN_EXPERIMENT.fullmatch(name)]
    assert len(compared) == 6 and sum(name.startswith("no-") for name in compared) == 3
    for run in runs.values():
        rows = read_rows(run)
        events = [recorded.event for row in rows if (recorded := parse(row)) is not None]
        assert len(events) == len(rows)
        assert isinstance(events[-1], RunFinished) and events[-1].status == "succeeded"
        assert sum(isinstance(event, TrainStep) for event in events) >= 16
        assert list((run / "logs").iterdir())
        for path in run.rglob("*"):
            if path.is_file():
                text = path.read_text()
                assert not any(word in text for word in ("/work/", "/root/", "/tmp/wt", "rhyme-openrlhf/src")), path
    kept = sorted((runs[LIVE] / "samples").iterdir())
    records = [json.loads(line) for path in kept for line in path.read_text().splitlines()]
    assert len(kept) >= 16 and {source for record in records for source, _ in record["pieces"]} >= {"", "history"}
