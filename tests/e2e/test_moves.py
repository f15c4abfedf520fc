"""A training run whose samples move by themselves, and which goes on without an engine that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import (
    EngineStep,
    Note,
    ProcessDied,
    RolloutFinished,
    RolloutStarted,
    RunFinished,
    SampleMoved,
    WeightsLoaded,
)

from .conftest import RUN_TIMEOUT_S, FinishedRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]


def engines(folder: Path) -> list[int]:
    """Processes of the engine actors whose driver works in `folder`, in the order of their start."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(b"ray::RhymeRolloutActor"):
                found += [int(process.name)] if Path(os.readlink(process / "cwd")) == folder else []
        except OSError:
            # It has ended since.
            continue
    return sorted(found)


def kill_one_in_step(step: int, run: Path, folder: Path) -> None:
    """Kill one engine's actor once the rollout of `step` goes on."""
    end = time.monotonic() + RUN_TIMEOUT_S
    log = run / "events.jsonl"
    while time.monotonic() < end:
        events = [recorded.event for recorded in read_events(log)] if log.exists() else []
        if any(isinstance(event, RolloutStarted) and event.step == step for event in events):
            time.sleep(0.3)
            os.kill(engines(folder)[-1], signal.SIGKILL)
            return
        time.sleep(0.1)


def test_samples_move_by_themselves_and_outlive_an_engine(train: Callable[..., FinishedRun], tmp_path: Path) -> None:
    killer = threading.Thread(target=kill_one_in_step, args=(3, tmp_path / "run", tmp_path), daemon=True)
    killer.start()
    run = train(
        "--vllm.num_engines", "2", "--no-histospec.enable", "--reallocation.enable", "--reallocation.threshold", "3",
        "--reallocation.cooldown_steps", "1", "--reallocation.status_s", "0.05", "--move.news_s", "0.05",
    )  # fmt: skip
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    moved = [event for event in run.of(SampleMoved) if event.outcome == "moved"]
    assert moved and {event.cause for event in moved} == {"reallocation"}
    assert all(event.downtime_seconds is not None for event in moved)
    assert len((run.path / "samples" / "step-000004.jsonl").read_text().splitlines()) == 8
    # Steps 3 and 4 are of one engine; each step is whole.
    assert [event.samples for event in run.of(RolloutFinished)] == [16] * 4
    assert [event.name for event in run.of(ProcessDied) if event.name.startswith("engine")]
    (lost,) = {event.engine for event in run.of(EngineStep)} - {e.engine for e in run.of(EngineStep) if e.step == 4}
    assert any(f"the run goes on without engine {lost}" in event.text for event in run.of(Note))
    assert {event.engine for event in run.of(WeightsLoaded) if event.version == 4} == {1 - lost}
