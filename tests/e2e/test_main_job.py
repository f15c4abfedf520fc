"""The main job: two epochs on two engines, with all that a run records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from rhyme_openrlhf.telemetry.events import (
    EngineInterval,
    EngineStep,
    Note,
    OffPolicyness,
    RolloutFinished,
    RunFinished,
    SystemSample,
    TrainStep,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests.e2e.runs import EVERY_SYNC, RUN_TIMEOUT_S, FinishedRun, check_weights, left_in_shared_memory

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)


def test_the_main_job(train: Callable[..., FinishedRun]) -> None:
    before = left_in_shared_memory()
    # Drafts from history alone, so that what the second epoch drafts is what the first one left.
    run = train("--vllm.num_engines", "2", "--no-histospec.own_output", "--no-histospec.siblings", *EVERY_SYNC)
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    # What Ray, DeepSpeed and the linker that it tries have to say is in the logs.
    assert not [line for line in run.output.splitlines() if re.search("core_worker|collect2|nanobind|Warning", line)]
    check_weights(run, engines=2, steps=4)

    # Steps, epochs and weight versions count as documented; a rollout runs the version its step trains from.
    assert [(event.step, event.epoch) for event in run.of(TrainStep)] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert {(event.step, event.weight_version) for event in run.of(EngineStep)} == {(1, 0), (2, 1), (3, 2), (4, 3)}
    assert [event.samples for event in run.of(RolloutFinished)] == [16] * 4

    # The first epoch has no history; the second is drafted from it.
    epochs = [
        sum((e.counters for e in run.of(EngineStep) if e.step in steps), EngineCounters()) for steps in ((1, 2), (3, 4))
    ]
    assert epochs[0].drafted == 0 and epochs[0].decode_tokens == epochs[0].sample_steps
    assert epochs[1].accepted > 0.2 * epochs[1].response_tokens
    assert epochs[1].decode_tokens > 1.5 * epochs[1].sample_steps
    for event, steps in zip(run.of(RolloutFinished), range(4), strict=True):
        counted = sum(e.counters.response_tokens for e in run.of(EngineStep) if e.step == steps + 1)
        assert counted == event.response_tokens

    # Each engine's time is accounted for without gaps, and no idle time is without a cause.
    for engine in (0, 1):
        intervals = [event for event in run.of(EngineInterval) if event.engine == engine]
        assert all(a.end == pytest.approx(b.start) for a, b in zip(intervals, intervals[1:], strict=False))
        assert all(event.cause for event in intervals if event.state == "idle")

    # Two prompts a step are kept with their responses, and with what was drafted of them, all of it from history.
    assert [(event.step, event.values, event.samples) for event in run.of(OffPolicyness)] == [
        (step, [0], [16]) for step in (1, 2, 3, 4)
    ]
    for step in (1, 2, 3, 4):
        kept = (run.path / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in kept]
        assert len(records) == 8 and len({record["group"] for record in records}) == 2
        assert all(record["weight_versions"] == [step - 1] * 2 for record in records)
        sources = {source for record in records for source, _ in record["pieces"]}
        assert sources == ({""} if step < 3 else {"", "history"})
        assert all((record["accepted"] > 0) == any(s for s, _ in record["pieces"]) for record in records)
    # And of all prompts the lengths, from which the run can be simulated.
    rows = [json.loads(line) for line in (run.path / "lengths.jsonl").read_text().splitlines()]
    for event in run.of(RolloutFinished):
        mine = [length for row in rows if row["step"] == event.step for length in row["lengths"]]
        assert (len(mine), sum(mine)) == (event.samples, event.response_tokens)
    assert {engine for row in rows for engine in row["engines"]} == {0, 1}
    # And what the machine did.
    assert {"engine 0", "engine 1", "trainer", "driver"} <= set(run.of(SystemSample)[-1].process_memory)

    # The record is complete, and nothing is left behind.
    assert {path.name for path in run.path.iterdir()} >= {"events.jsonl", "logs", "checkpoints"}
    config = json.loads((run.path / "config.json").read_text())
    assert config["arguments"]["rollout"]["batch_size"] == 4 and config["settings"]["histospec"]["window_max"] == 32
    assert config["versions"]["openrlhf"] == "0.11.2"
    assert json.loads((run.path / "summary.json").read_text())["steps"] == 4
    assert any("RhymePPOTrainer" in log.read_text() for log in (run.path / "logs").glob("worker-*"))
    assert left_in_shared_memory() <= before
    assert "step 4/4" in run.output and "speculation" in run.output
    assert not run.of(Note) or all(event.level == "info" for event in run.of(Note))
