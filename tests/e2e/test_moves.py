"""A training run whose samples move by themselves, and which goes on without an engine that is killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry.events import (
    EngineStep,
    Note,
    ProcessDied,
    RolloutFinished,
    RunFinished,
    SampleMoved,
    WeightsLoaded,
)
from tests.e2e.runs import RUN_TIMEOUT_S, FinishedRun, kill_one_in_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]


@pytest.mark.parametrize("engines", [2, 4])
def test_samples_move_by_themselves_and_outlive_an_engine(
    train: Callable[..., FinishedRun], tmp_path: Path, engines: int
) -> None:
    killer = threading.Thread(target=kill_one_in_step, args=(7, tmp_path / "run", tmp_path), daemon=True)
    killer.start()
    # Of two engines each begins with eight samples: at half of them one often has more and the other less. A rollout of
    # this small model takes a third of a second, so some steps end before anything moves.
    run = train(
        "--vllm.num_engines", str(engines), "--no-histospec.enable", "--reallocation.enable",
        "--reallocation.threshold", str(8 // engines), "--reallocation.cooldown_steps", "1",
        "--reallocation.status_s", "0.05", "--move.news_s", "0.05", "--train.num_episodes", "4",
    )  # fmt: skip
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    moved = [event for event in run.of(SampleMoved) if event.outcome == "moved"]
    assert moved and {event.cause for event in moved} == {"reallocation"}
    # Of a sample that ends before its engine is asked for the time of its first token, none is known. One that had just
    # come to the engine that is killed has no first token there.
    downtimes = [event.downtime_seconds for event in moved if event.downtime_seconds is not None]
    assert downtimes and min(downtimes) > 0
    assert len((run.path / "samples" / "step-000008.jsonl").read_text().splitlines()) == 8
    # Steps 7 and 8 are of the others; each step is whole.
    assert [event.samples for event in run.of(RolloutFinished)] == [16] * 8
    assert [event.name for event in run.of(ProcessDied) if event.name.startswith("engine")]
    (lost,) = {event.engine for event in run.of(EngineStep)} - {e.engine for e in run.of(EngineStep) if e.step == 8}
    assert any(f"the run goes on without engine {lost}" in event.text for event in run.of(Note))
    assert {event.engine for event in run.of(WeightsLoaded) if event.version == 8} == {*range(engines)} - {lost}
