"""A run that was killed and resumed is the run that was not: same prompts, tokens and losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    EngineStep,
    Note,
    RolloutFinished,
    RolloutStarted,
    TrainStep,
    WeightsLoaded,
)
from tests.e2e.runs import RUN_TIMEOUT_S, FinishedRun, Train, journal_prompts

REPRODUCED = ("policy_loss", "actor_grad_norm", "reward", "response_length", "actor_lr")
SAME_SAMPLES = ("samples", "response_tokens", "length_mean", "length_median", "length_p95", "length_max", "truncated")


def steps_of(run: FinishedRun) -> dict[int, tuple[RolloutFinished, TrainStep]]:
    rollouts = {event.step: event for event in run.of(RolloutFinished)}
    return {event.step: (rollouts[event.step], event) for event in run.of(TrainStep)}


def check_same(expected: tuple[RolloutFinished, TrainStep], found: tuple[RolloutFinished, TrainStep]) -> None:
    for name in SAME_SAMPLES:
        assert getattr(found[0], name) == getattr(expected[0], name), (name, expected, found)
    assert found[0].reward_mean == pytest.approx(expected[0].reward_mean, rel=1e-5)
    for name in REPRODUCED:
        values = expected[1].metrics[name], found[1].metrics[name]
        assert values[1] == pytest.approx(values[0], rel=1e-5, abs=1e-6), (name, *values)
    assert (found[1].step, found[1].epoch) == (expected[1].step, expected[1].epoch)


# Three runs one after the other.
@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
def test_a_killed_run_goes_on_as_if_it_had_not_been(train: Train, start: Any, tmp_path: Path) -> None:
    options = ("--vllm.num_engines", "1", "--ckpt.save_steps", "1", "--ckpt.max_num", "2")
    whole = train(*options, "--ckpt.path", str(tmp_path / "other"), name="whole")
    assert whole.code == 0, whole.output
    expected = steps_of(whole)
    assert sorted(expected) == [1, 2, 3, 4]

    killed = start("killed", *options)
    killed.wait_for(lambda event: isinstance(event, RolloutStarted) and event.step == 3, "the rollout of step 3")
    killed.kill()
    assert [event.step for event in killed.events() if isinstance(event, CheckpointSaved)] == [1, 2]
    # What a kill during the next save would have left.
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
    found = steps_of(resumed)
    assert sorted(found) == [3, 4]
    for step in (3, 4):
        check_same(expected[step], found[step])
    engine = {event.step: event for event in resumed.of(EngineStep)}
    assert engine[3].counters.accepted > 0
    assert {step: event.weight_version for step, event in engine.items()} == {3: 2, 4: 3}
    # The second epoch drew each of the eight prompts once.
    drawn = [prompt for step, prompt in journal_prompts(resumed.path) if step in (3, 4)]
    assert len(drawn) == len(set(drawn)) == 8
    assert json.loads((resumed.path / "summary.json").read_text())["steps"] == 2
    assert {path.name for path in (tmp_path / "ckpt" / "_rhyme").iterdir()} == {"global_step3", "global_step4"}


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
