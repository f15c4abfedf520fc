"""A disk that is full costs events, which are counted; never the run, and never a line that is none."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("ray")

import ray

from rhyme_openrlhf.run import launch
from rhyme_openrlhf.settings.telemetry import TelemetrySettings
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import Note, RolloutFinished
from rhyme_openrlhf.telemetry.recorder import PlainRecorder

RESTARTED_WITHIN_S = 60


@pytest.fixture
def limit() -> Callable[[int], None]:
    """Sets how large a file may become (-1: any): like a full disk, the kernel takes a part of a line, then none."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # type: ignore[misc]
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", range(2000, 2200, 13))
def test_a_full_disk_is_survived_and_counted(tmp_path: Path, limit: Callable[[int], None], size: int) -> None:
    path = tmp_path / "events.jsonl"
    recorder = PlainRecorder(str(path))
    limit(size)
    for number in range(50):
        recorder.write(Note("info", f"before {number}"), "driver", float(number))
    whole = len(list(read_events(path)))
    assert 0 < whole < 50
    limit(-1)
    for number in range(50, 60):
        recorder.write(Note("info", f"after {number}"), "driver", float(number))
    recorder.close()
    events = list(read_events(path))
    notes = [recorded.event.text for recorded in events if recorded.source == "recorder"]
    mine = [recorded for recorded in events if recorded.source == "driver"]
    # The line that had begun was finished.
    torn = len(mine) - whole - 10
    lost = 50 - whole - torn
    assert torn in (0, 1)
    assert len(notes) == 1 and notes[0].startswith(f"{lost} events could not be written to {path}")
    assert [recorded.sequence for recorded in mine] == [*range(whole + torn), *range(50, 60)]


def test_a_note_that_does_not_fit_comes_later(tmp_path: Path, limit: Callable[[int], None]) -> None:
    path = tmp_path / "events.jsonl"
    recorder = PlainRecorder(str(path))
    recorder.write(Note("info", "first"), "driver", 0.0)
    line = path.stat().st_size
    limit(line)
    recorder.write_all([Note("info", "wrong"), Note("info", "lost!")], "driver", 1.0)
    limit(2 * line)
    recorder.write(Note("info", "fits!"), "driver", 2.0)
    assert [recorded.sequence for recorded in read_events(path)] == [0, 3]
    limit(-1)
    recorder.write(Note("info", "later"), "driver", 3.0)
    recorder.close()
    texts = [recorded.event.text for recorded in read_events(path)]
    assert texts[:3] == ["first", "fits!", "later"]
    assert len(texts) == 4 and texts[3].startswith("2 events could not be written")


def test_lost_events_of_progress_can_be_taken_once(tmp_path: Path, limit: Callable[[int], None]) -> None:
    recorder = PlainRecorder(str(tmp_path / "events.jsonl"))
    finished = [RolloutFinished(step, 1, 5.0, 16, 100, None, 6.0, 6.0, 8.0, 9, 0) for step in range(4)]
    recorder.write(finished[0], "rollout", 0.0)
    limit((tmp_path / "events.jsonl").stat().st_size)
    recorder.write_all([finished[1], Note("info", "no progress"), finished[2]], "rollout", 1.0)
    limit(-1)
    recorder.write(finished[3], "rollout", 2.0)
    recorder.close()
    assert recorder.take_lost() == finished[1:3]
    assert recorder.take_lost() == []


def test_responses_are_kept_and_a_full_disk_costs_them_and_one_note(
    tmp_path: Path, limit: Callable[[int], None]
) -> None:
    path = tmp_path / "events.jsonl"
    recorder = PlainRecorder(str(path), TelemetrySettings(samples_mb=1))
    recorder.write_samples(1, [b"{}\n"])
    limit(1000)
    recorder.write_samples(2, [b"x" * 5000])
    recorder.write_samples(3, [b"x" * 5000])
    limit(-1)
    recorder.write_samples(4, [b"{}\n"])
    recorder.close()
    assert sorted(one.name for one in (tmp_path / "samples").iterdir()) == ["step-000001.jsonl", "step-000004.jsonl"]
    notes = [recorded.event.text for recorded in read_events(path)]
    assert len(notes) == 1 and notes[0].startswith("responses of step 2 could not be kept")


def test_a_table_of_samples_is_kept_beside_the_responses_and_a_full_disk_costs_it_alone(
    tmp_path: Path, limit: Callable[[int], None]
) -> None:
    path = tmp_path / "events.jsonl"
    recorder = PlainRecorder(str(path), TelemetrySettings(samples_mb=1))
    limit(1000)
    recorder.write_sample_table(1, [{"step": 1, "number": 0, "reward": 0.5}])
    limit(-1)
    recorder.write_sample_table(2, [{"step": 2, "number": 0, "reward": 0.5}])
    recorder.close()
    (kept,) = (tmp_path / "samples").iterdir()
    assert pq.read_table(kept).to_pylist()[0]["reward"] == 0.5 and kept.name == "step-000002.parquet"
    (note,) = [recorded.event.text for recorded in read_events(path)]
    assert note.startswith("the table of samples of step 1 could not be kept")


def test_a_recorder_that_was_killed_goes_on_with_its_file(tmp_path: Path, starts_ray: None) -> None:
    path = tmp_path / "events.jsonl"
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        job: Any = SimpleNamespace(
            run=SimpleNamespace(events=path), settings=SimpleNamespace(telemetry=TelemetrySettings())
        )
        recorder = launch._start_recorder(job)
        ray.get(recorder.write.remote(Note("info", "before"), "driver", 0.0))
        process = ray.get(recorder.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(process, signal.SIGKILL)
        until = time.monotonic() + RESTARTED_WITHIN_S
        while True:
            # What is on its way to a dead recorder is lost.
            with suppress(ray.exceptions.RayActorError):
                ray.get(recorder.write.remote(Note("info", "after"), "driver", 1.0), timeout=RESTARTED_WITHIN_S)
                break
            assert time.monotonic() < until
            time.sleep(0.1)
        ray.get(recorder.close.remote())
    finally:
        ray.shutdown()
    assert [(one.event.text, one.sequence) for one in read_events(path)] == [("before", 0), ("after", 1)]


def test_responses_of_a_recorder_that_died_count_towards_what_is_kept(tmp_path: Path) -> None:
    line = b"x" * 600_000
    for step in (1, 2):
        # Each is a new process's.
        PlainRecorder(str(tmp_path / "events.jsonl"), TelemetrySettings(samples_mb=1)).write_samples(step, [line])
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000002.jsonl"]
