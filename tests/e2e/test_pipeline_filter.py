"""Dynamic filtering in the streaming pipeline as a user runs it: every prompt trains or is filtered out, once an epoch,
also when the run is killed."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.telemetry.events import CheckpointSaved, Note, OffPolicyness, RolloutFinished, TrainStep
from tests.e2e.runs import PARTIAL, PIPELINE, RUN_TIMEOUT_S, Train, journal_prompts

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

# The prompts in `USELESS` are always answered rightly; of the others every second answer is, by its length.
REWARD = """
import torch

USELESS = {useless!r}


def reward_func(queries, prompts, labels, **_):
    rewards = [1.0 if prompt in USELESS else 0.25 + 0.5 * (len(query) % 2) for query, prompt in zip(queries, prompts)]
    return {{"rewards": torch.tensor(rewards), "scores": torch.tensor(rewards), "extra_logs": {{}}}}
"""


def options_for(small_prompts: Path, folder: Path, epochs: int) -> tuple[str, ...]:
    """A run in which two prompts of eight teach nothing; engines may have six prompts at a time."""
    prompts = [json.loads(line)["input"] for line in small_prompts.read_text().splitlines()]
    reward = folder / "reward.py"
    reward.write_text(REWARD.format(useless=prompts[:2]))
    return (
        *PIPELINE, *PARTIAL, "--train.num_episodes", str(epochs), "--reward.remote_url", str(reward),
        "--algo.dynamic_filtering_enable", "--rollout.vllm_generate_batch_size", "6",
    )  # fmt: skip


def check_epochs(by_epoch: dict[int, list[str]], small_prompts: Path, epochs: int, events: list[Any]) -> None:
    """Each epoch trained on its useful prompts once, and on no other one but as a note says: of a step that would have
    had none."""
    useful = {prompt_key(json.loads(line)["input"]) for line in small_prompts.read_text().splitlines()[2:]}
    assert set(by_epoch) == set(range(1, epochs + 1)) and len(useful) == 6
    kept = sum(isinstance(event, Note) and "although it is filtered out" in event.text for event in events)
    for prompts in by_epoch.values():
        assert len(prompts) == len(set(prompts)) and useful <= set(prompts)
    assert sum(len(set(prompts) - useful) for prompts in by_epoch.values()) <= kept


def trained_by_epoch(runs: list[tuple[Path, list[Any], range]]) -> dict[int, list[str]]:
    """The prompts that each epoch trained on; of each run (directory, events) the steps that count."""
    found: dict[int, list[str]] = defaultdict(list)
    for path, events, steps in runs:
        epochs = {event.step: event.epoch for event in events if isinstance(event, RolloutFinished)}
        for step, prompt in journal_prompts(path):
            if step in steps:
                found[epochs[step]].append(prompt)
    return found


@pytest.mark.slow
def test_every_prompt_that_is_not_filtered_out_trains_once_an_epoch(
    train: Train, small_prompts: Path, tmp_path: Path
) -> None:
    run = train(*options_for(small_prompts, tmp_path, epochs=2))
    assert run.code == 0, run.output
    trained = run.of(TrainStep)
    last = trained[-1].step
    assert [event.step for event in trained] == list(range(1, last + 1))
    by_epoch = trained_by_epoch([(run.path, run.events, range(1, last + 1))])
    check_epochs(by_epoch, small_prompts, 2, run.events)
    # Two of eight, drawn by any steps; an epoch's steps are full as long as it has prompts.
    rates = [event.metrics["dynamic_filtering_pass_rate"] for event in trained]
    assert min(rates) < 100 and all(0 < rate <= 100 for rate in rates)
    assert [event.samples for event in run.of(RolloutFinished)][0] == 12
    assert all(set(event.values) <= {0, 1} for event in run.of(OffPolicyness))
    assert any("--rollout.vllm_generate_batch_size" in event.text for event in run.of(Note))


@pytest.mark.slow
def test_a_killed_run_trains_every_prompt_that_is_not_filtered_out_once(
    train: Train,
    start: Any,
    small_prompts: Path,
    tmp_path: Path,
) -> None:
    options = (*options_for(small_prompts, tmp_path, epochs=3), "--ckpt.save_steps", "1")
    killed = start("killed", *options)
    killed.wait_for(lambda event: isinstance(event, CheckpointSaved) and event.step == 4, "the checkpoint of step 4")
    killed.kill()
    resumed = train(*options, "--ckpt.load_enable")
    assert resumed.code == 0, resumed.output
    steps = [event.step for event in resumed.of(TrainStep)]
    assert steps == list(range(steps[0], steps[-1] + 1)) and steps[0] >= 5
    by_epoch = trained_by_epoch(
        [
            (killed.path, killed.events(), range(1, steps[0])),
            (resumed.path, resumed.events, range(steps[0], steps[-1] + 1)),
        ]
    )
    check_epochs(by_epoch, small_prompts, 3, [*killed.events(), *resumed.events])
