"""Rehearsal in whole runs: nothing that trains changes, and the first epoch has drafts."""

from __future__ import annotations

import json

import pytest

from rhyme_openrlhf.telemetry.events import (
    EngineInterval,
    EngineStep,
    OffPolicyness,
    RolloutFinished,
    TrainStep,
    WeightsChecked,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests.e2e.runs import EVERY_SYNC, PIPELINE, RUN_TIMEOUT_S, SAME_LOG_PROBABILITY, FinishedRun, Train

pytestmark = pytest.mark.timeout(3 * RUN_TIMEOUT_S)


def trained(run: FinishedRun) -> list[object]:
    """Return everything that the run trained on, and its losses."""
    samples = []
    for path in sorted((run.path / "samples").iterdir()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        texts = ["".join(text for _, text in row["pieces"]) for row in rows]
        samples.append(sorted((row["prompt"], row["reward"], text) for row, text in zip(rows, texts, strict=True)))
    lengths = sorted(
        (row["step"], row["prompt"], *sorted(row["lengths"]))
        for row in map(json.loads, (run.path / "lengths.jsonl").read_text().splitlines())
    )
    ages = [(event.step, event.values, event.samples, event.tokens) for event in run.of(OffPolicyness)]
    tokens = [(event.step, event.samples, event.response_tokens) for event in run.of(RolloutFinished)]
    return [samples, lengths, ages, tokens]


def rehearsed(run: FinishedRun) -> float:
    return sum(event.end - event.start for event in run.of(EngineInterval) if event.state == "rehearse")


def test_a_reproducible_run_trains_the_same_with_and_without(train: Train) -> None:
    every = ("--telemetry.sample_groups", "4", "--vllm.num_engines", "2")
    without = train(*every, name="without")
    with_it = train(*every, "--rehearsal.enable", name="with")
    assert without.code == 0 and with_it.code == 0, without.output + with_it.output
    assert rehearsed(without) == 0 and rehearsed(with_it) > 0
    assert trained(with_it) == trained(without)
    for one, other in zip(with_it.of(TrainStep), without.of(TrainStep), strict=True):
        for name in ("policy_loss", "reward", "response_length", "actor_grad_norm", "return"):
            assert one.metrics[name] == other.metrics[name], (one.step, name)
    # A bubble all the same, with the cause for which the engine would be idle.
    assert all(event.cause for event in with_it.of(EngineInterval) if event.state == "rehearse")


def test_a_pipelined_run_has_drafts_in_its_first_epoch(train: Train) -> None:
    run = train(*PIPELINE, "--rehearsal.enable", "--vllm.num_engines", "2", *EVERY_SYNC)
    assert run.code == 0, run.output
    checked = run.of(WeightsChecked)
    assert checked and max(event.max_difference for event in checked) < SAME_LOG_PROBABILITY
    assert rehearsed(run) > 0
    counters = sum((event.counters for event in run.of(EngineStep)), EngineCounters())
    finished = run.of(RolloutFinished)
    # Only real samples are counted.
    assert counters.response_tokens == sum(event.response_tokens for event in finished)
    assert counters.finished_samples == sum(event.samples for event in finished) == 4 * 16
