"""The ways in which a run can be laid out, and a run without our features."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.telemetry.events import RolloutFinished, TrainStep
from tests.e2e.runs import EVERY_SYNC, RUN_TIMEOUT_S, SMALL, Train, check_weights

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

# OpenRLHF's own actors, on this machine.
UNCHANGED = Path(__file__).parents[2] / "benchmarks" / "unchanged.py"


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


def test_zero3_two_policy_ranks_and_tensor_parallel_engine(train: Train) -> None:
    """Weights gathered from two ranks, published by both, loaded into a tensor-parallel engine."""
    run = train(
        "--actor.num_gpus_per_node", "2", "--ds.zero_stage", "3", "--vllm.num_engines", "1",
        "--vllm.tensor_parallel_size", "2", "--train.num_episodes", "1", "--weights.bucket_mb", "1", *EVERY_SYNC,
    )  # fmt: skip
    assert run.code == 0, run.output
    check_weights(run, engines=1, steps=2)
