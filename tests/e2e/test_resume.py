"""A run that was killed and resumed is the run that was not: same prompts, tokens and losses."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    EngineStep,
    Event,
    Note,
    RolloutFinished,
    RolloutStarted,
    StageStarted,
    TrainStep,
    WeightsLoaded,
)
from tests.e2e.runs import RUN_TIMEOUT_S, Train, journal_prompts

REPRODUCED = ("policy_loss", "actor_grad_norm", "reward", "response_length", "actor_lr")
SAME_SAMPLES = ("samples", "response_tokens", "length_mean", "length_median", "length_p95", "length_max", "truncated")


def steps_of(events: list[Event]) -> dict[int, tuple[RolloutFinished, TrainStep]]:
    """Return the rollout and the training of each step that has ended."""
    rollouts = {event.step: event for event in events if isinstance(event, RolloutFinished)}
    return {event.step: (rollouts[event.step], event) for event in events if isinstance(event, TrainStep)}


def check_same(expected: tuple[RolloutFinished, TrainStep], found: tuple[RolloutFinished, TrainStep]) -> None:
    for name in SAME_SAMPLES:
        assert getattr(found[0], name) == getattr(expected[0], name), (name, expected, found)
    assert found[0].reward_mean == pytest.approx(expected[0].reward_mean, rel=1e-5)
    for name in REPRODUCED:
        values = expected[1].metrics[name], found[1].metrics[name]
        assert values[1] == pytest.approx(values[0], rel=1e-5, abs=1e-6), (name, *values)
    assert (found[1].step, found[1].epoch) == (expected[1].step, expected[1].epoch)


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_killed_run_goes_on_as_if_it_had_not_been(train: Train, start: Any, tmp_path: Path) -> None:
    """The killed run has gone through steps 3 and 4 itself, and the resumed run goes through them again."""
    options = ("--vllm.num_engines", "1", "--ckpt.save_steps", "1", "--ckpt.max_num", "3", "--train.num_episodes", "3")
    killed = start("killed", *options)
    killed.wait_for(lambda event: isinstance(event, RolloutStarted) and event.step == 5, "the rollout of step 5")
    killed.kill()
    events = killed.events()
    expected = steps_of(events)
    assert sorted(expected) == [1, 2, 3, 4]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [1, 2, 3, 4]
    # As if the kill had come during the save of step 3.
    for step, folder in itertools.product((3, 4), ("_actor", "_rhyme")):
        shutil.rmtree(tmp_path / "ckpt" / folder / f"global_step{step}")
    half = tmp_path / "ckpt" / "_actor" / "global_step3"
    half.mkdir()
    (half / "mp_rank_00_model_states.pt").write_bytes(b"torn")
    (tmp_path / "ckpt" / "_rhyme" / "global_step3").mkdir()
    (tmp_path / "ckpt" / "_actor" / "latest").write_text("global_st")

    resumed = train(*options, "--ckpt.load_enable")
    assert resumed.code == 0, resumed.output
    notes = [event.text for event in resumed.of(Note)]
    assert sum("resumes from checkpoint global_step2" in text and "after step 2" in text for text in notes) == 1
    assert "history of 8 prompts restored" in notes
    found = steps_of(resumed.events)
    assert sorted(found) == [3, 4, 5, 6]
    for step in (3, 4):
        check_same(expected[step], found[step])
    engine = {event.step: event for event in resumed.of(EngineStep)}
    assert engine[3].counters.accepted > 0
    assert {step: event.weight_version for step, event in engine.items()} == {3: 2, 4: 3, 5: 4, 6: 5}
    # The second and the third epoch drew each of the eight prompts once.
    for epoch in ((3, 4), (5, 6)):
        drawn = [prompt for step, prompt in journal_prompts(resumed.path) if step in epoch]
        assert len(drawn) == len(set(drawn)) == 8
    assert json.loads((resumed.path / "summary.json").read_text())["steps"] == 4
    kept = {path.name for path in (tmp_path / "ckpt" / "_rhyme").iterdir()}
    assert kept == {"global_step4", "global_step5", "global_step6"}


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_an_asynchronous_run_goes_on_counting(train: Train, start: Any) -> None:
    """Killed in the second of three epochs; every prompt is trained once in the rest of that epoch and in the third."""
    options = ("--train.async_enable", "--vllm.num_engines", "1", "--ckpt.save_steps", "1", "--train.num_episodes", "3")
    killed = start("killed", *options)
    killed.wait_for(lambda event: isinstance(event, CheckpointSaved) and event.step == 3, "the checkpoint of step 3")
    killed.kill()
    resumed = train(*options, "--ckpt.load_enable")
    assert resumed.code == 0, resumed.output
    trained = [event.step for event in resumed.of(TrainStep)]
    first = trained[0]
    assert first >= 4 and trained == list(range(first, 7))
    assert any(f"after step {first - 1}" in event.text for event in resumed.of(Note))
    started = [event.step for event in resumed.of(RolloutStarted)]
    assert started == trained
    assert [event.epoch for event in resumed.of(RolloutStarted)] == [(step - 1) // 2 + 1 for step in started]
    assert min(event.version for event in resumed.of(WeightsLoaded)) == first - 1
    versions = [event.weight_version for event in resumed.of(EngineStep)]
    assert versions[0] == first - 1 and versions == sorted(versions)
    assert any(event.counters.accepted for event in resumed.of(EngineStep) if event.step == first)
    before = journal_prompts(killed.path)
    after = journal_prompts(resumed.path)
    for epoch in (2, 3):
        steps = {2 * epoch - 1, 2 * epoch}
        drawn = {prompt for step, prompt in before if step in steps and step < first}
        drawn_after = [prompt for step, prompt in after if step in steps and step >= first]
        # The resumed run's journal also begins with what the checkpoint knew.
        assert len(set(drawn_after)) == len(drawn_after) and not drawn & set(drawn_after)
        assert len(drawn | set(drawn_after)) == 8


# Notes what it rewards: prompt and response, in the order in which they come.
NOTED_REWARD = """
import fcntl
import hashlib
import json

import torch


def reward_func(queries, prompts, labels, **_):
    with open({path!r}, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for query in queries:
            file.write(json.dumps(query) + "\\n")
    rewards = torch.tensor([hashlib.sha256(query.encode()).digest()[0] / 256 for query in queries])
    return {{"rewards": rewards, "scores": rewards, "extra_logs": {{}}}}
"""
# What is killed at its beginning, all in step 3 of 4: after the phase before it.
KILLED_AT = ("rollout", "experience", "train", "sync", "checkpoint", "saved")
SAMPLES_OF_STEP = 16
ACTORS = ("_actor", "_critic")


def begins(event: Event, phase: str) -> bool:
    if phase == "rollout":
        return isinstance(event, RolloutStarted) and event.step == 3
    if phase == "saved":
        return isinstance(event, CheckpointSaved) and event.step == 3
    return isinstance(event, StageStarted) and (event.step, event.stage) == (3, phase)


def weights_of(checkpoints: Path) -> dict[str, str]:
    """Return the hash of each weight and optimizer state after step 4, of policy and critic."""
    import torch

    found = {}
    for actor in ACTORS:
        for path in sorted((checkpoints / actor / "global_step4").glob("*_states.pt")):
            state = torch.load(path, map_location="cpu", weights_only=False)
            for name, value in tensors(state, f"{actor}/{path.name}"):
                found[name] = hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
    return found


def tensors(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a nested state, by their places in it."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from tensors(one, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from tensors(one, f"{name}/{number}")


@pytest.mark.slow
@pytest.mark.timeout(8 * RUN_TIMEOUT_S)
def test_a_run_killed_in_any_phase_has_the_same_tokens_and_weights(train: Train, start: Any, tmp_path: Path) -> None:
    """With a critic, a KL penalty, and two engines."""

    def options(name: str) -> tuple[list[str], Path, Path]:
        noted, reward, saved = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.py", tmp_path / f"{name}-ckpt"
        reward.write_text(NOTED_REWARD.format(path=str(noted)))
        chosen = [
            "--reward.remote_url", str(reward), "--ckpt.path", str(saved), "--ckpt.save_steps", "1",
            "--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "1",
            "--critic.model_name_or_path", str(embedded.MODEL),
            "--algo.kl.init_coef", "0.01", "--ref.num_gpus_per_node", "1",
        ]  # fmt: skip
        return chosen, noted, saved

    def responses(noted: Path) -> list[list[str]]:
        """Return each step's prompts and responses, sorted."""
        lines = noted.read_text().splitlines()
        return [sorted(lines[at : at + SAMPLES_OF_STEP]) for at in range(0, len(lines), SAMPLES_OF_STEP)]

    chosen, noted, saved = options("whole")
    whole = train(*chosen, name="whole")
    assert whole.code == 0, whole.output
    expected, weights = responses(noted), weights_of(saved)
    assert [len(step) for step in expected] == [SAMPLES_OF_STEP] * 4
    # Weights, master weights and two moments, of both models.
    assert {name.split("/")[0] for name in weights} == set(ACTORS) and len(weights) > 8
    for phase in KILLED_AT:
        chosen, noted, saved = options(phase)
        killed = start(phase, *chosen)
        killed.wait_for(lambda event, phase=phase: begins(event, phase), f"the beginning of '{phase}' in step 3")
        killed.kill()
        before = responses(noted)
        assert before[:2] == expected[:2], phase
        noted.unlink()
        resumed = train(*chosen, "--ckpt.load_enable", name=f"{phase}-resumed")
        assert resumed.code == 0, resumed.output
        again = resumed.of(TrainStep)[0].step
        # A checkpoint may be whole before the kill.
        assert again in {"checkpoint": (3, 4), "saved": (4,)}.get(phase, (3,)), phase
        assert [event.step for event in resumed.of(TrainStep)] == list(range(again, 5)), phase
        assert responses(noted) == expected[again - 1 :], phase
        assert weights_of(saved) == weights, phase
