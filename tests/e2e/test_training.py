"""The main job as a user runs it, and the ways it can be laid out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.telemetry.events import (
    EngineInterval,
    EngineStep,
    Note,
    OffPolicyness,
    RolloutFinished,
    RunFinished,
    SystemSample,
    TrainStep,
    WeightsChecked,
    WeightsLoaded,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters

from .conftest import RUN_TIMEOUT_S, SMALL, FinishedRun, left_in_shared_memory

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

Train = Callable[..., FinishedRun]
# OpenRLHF's own actors, on this machine.
UNCHANGED = Path(__file__).parents[2] / "benchmarks" / "unchanged.py"
# fp32 on both sides: the same sums in another order.
SAME_LOG_PROBABILITY = 1e-3
EVERY_SYNC = ("--weights.check_syncs", "1000")


def check_weights(run: FinishedRun, engines: int, steps: int) -> None:
    """Every engine loaded every version, and its log-probabilities then were the trained model's."""
    loaded = {(event.version, event.engine) for event in run.of(WeightsLoaded)}
    assert loaded == {(version, engine) for version in range(1, steps + 1) for engine in range(engines)}
    checked = run.of(WeightsChecked)
    assert len(checked) == engines * steps
    assert max(event.max_difference for event in checked) < SAME_LOG_PROBABILITY


def test_the_main_job(train: Train) -> None:
    before = left_in_shared_memory()
    # Drafts from history alone, so that what the second epoch drafts is what the first one left.
    run = train("--vllm.num_engines", "2", "--no-histospec.own_output", "--no-histospec.siblings", *EVERY_SYNC)
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    # What Ray, DeepSpeed and the linker that it tries have to say is in the logs.
    assert not [line for line in run.output.splitlines() if re.search("core_worker|collect2|Warning", line)]
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


def test_with_our_features_off_the_run_is_openrlhfs_own(train: Train, tmp_path: Path, small_prompts: Path) -> None:
    """Same prompts in the same order, same tokens, same losses as OpenRLHF's own classes."""
    one_engine = ["--vllm.num_engines", "1", "--train.num_episodes", "1"]
    ours = train("--no-histospec.enable", "--weights.transport", "openrlhf", *one_engine)
    assert ours.code == 0, ours.output
    status = tmp_path / "status.jsonl"
    argv = [*arguments(str(tmp_path / "ckpt2")), "--data.prompt_dataset", str(small_prompts), *SMALL, *one_engine]
    done = subprocess.run(
        [sys.executable, str(UNCHANGED), str(status), *argv],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = [json.loads(line) for line in status.read_text().splitlines()]
    steps = ours.of(TrainStep)
    assert len(theirs) == len(steps) == 2
    for expected, step in zip(theirs, steps, strict=True):
        for name in ("policy_loss", "reward", "response_length", "actor_grad_norm", "return"):
            assert step.metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    tokens = [event.response_tokens for event in ours.of(RolloutFinished)]
    assert tokens == [row["response_tokens"] for row in theirs]


def test_async_with_partial_rollout(train: Train) -> None:
    run = train("--train.async_enable", "--train.partial_rollout_enable", *EVERY_SYNC)
    assert run.code == 0, run.output
    check_weights(run, engines=2, steps=4)
    assert [event.step for event in run.of(TrainStep)] == [1, 2, 3, 4]
    assert all(set(event.values) <= {0, 1} and sum(event.samples) == 16 for event in run.of(OffPolicyness))
    assert {path.name for path in (run.path / "samples").iterdir()} == {f"step-{n:06d}.jsonl" for n in (1, 2, 3, 4)}


def test_zero3_two_policy_ranks_and_tensor_parallel_engine(train: Train) -> None:
    """Weights gathered from two ranks, published by both, loaded into a tensor-parallel engine."""
    run = train(
        "--actor.num_gpus_per_node", "2", "--ds.zero_stage", "3", "--vllm.num_engines", "1",
        "--vllm.tensor_parallel_size", "2", "--train.num_episodes", "1", "--weights.bucket_mb", "1", *EVERY_SYNC,
    )  # fmt: skip
    assert run.code == 0, run.output
    check_weights(run, engines=1, steps=2)
