"""The streaming pipeline as a user runs it: every prompt of every epoch trained once, in any order of the engines."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    EngineInterval,
    EngineStep,
    Evaluation,
    Note,
    OffPolicyness,
    RankGroups,
    RolloutFinished,
    RunFinished,
    SampleMoved,
    TrainStep,
    WeightsChecked,
    WeightsLoaded,
)
from tests.e2e.runs import (
    EVERY_SYNC,
    PARTIAL,
    PIPELINE,
    RUN_TIMEOUT_S,
    SAME_LOG_PROBABILITY,
    Train,
    journal_prompts,
    kill_one_in_step,
    left_in_shared_memory,
)

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)


def trained_once(journal: list[tuple[int, str]], steps: set[int], epochs: int) -> None:
    """Every prompt once in each epoch of three steps, as far as the epoch is in `steps`."""
    for epoch in range(epochs):
        drawn = [prompt for step, prompt in journal if step in steps and (step - 1) // 3 == epoch]
        assert len(drawn) == len(set(drawn)) == 8, (epoch, drawn)


def test_three_epochs(train: Train) -> None:
    before = left_in_shared_memory()
    reference = ("--algo.kl.init_coef", "0.01", "--ref.num_gpus_per_node", "1")
    run = train(*PIPELINE, *PARTIAL, "--train.num_episodes", "3", *EVERY_SYNC, *reference)
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    assert [(event.step, event.epoch) for event in run.of(TrainStep)] == [(n, (n + 2) // 3) for n in range(1, 10)]
    trained_once(journal_prompts(run.path), set(range(1, 10)), epochs=3)
    samples = [12, 12, 8] * 3
    # Updates of four samples, in micro-batches of two: each step is applied in itself.
    counted = [(e.metrics["policy/optimizer_steps"], e.metrics["policy/micro_batches"]) for e in run.of(TrainStep)]
    assert counted == [(count / 4, count / 2) for count in samples]
    assert [event.samples for event in run.of(RolloutFinished)] == samples
    ages: Counter[int] = Counter()
    for event, count in zip(run.of(OffPolicyness), samples, strict=True):
        assert set(event.values) <= {0, 1} and sum(event.samples) == count
        ages.update(dict(zip(event.values, event.samples, strict=True)))
    assert ages[1] > 0

    # Weights only ever become newer, and are the policy's.
    for engine in (0, 1):
        versions = [event.version for event in run.of(WeightsLoaded) if event.engine == engine]
        assert versions and versions == sorted(set(versions))
    checked = run.of(WeightsChecked)
    assert checked and all(event.max_difference < SAME_LOG_PROBABILITY for event in checked)

    # When the second epoch's first steps are handed out, not all lengths of the first are known.
    ranked = run.of(RankGroups)
    assert {7, 8, 9} <= {event.step for event in ranked} <= set(range(4, 10))
    assert all(len(event.prompts) == 2 and event.predicted == sorted(event.predicted) for event in ranked)
    # Every moment of an engine has one state.
    intervals: dict[int, list[EngineInterval]] = defaultdict(list)
    for interval in run.of(EngineInterval):
        intervals[interval.engine].append(interval)
    for one in intervals.values():
        assert [i.start for i in one[1:]] == [i.end for i in one[:-1]]
        assert {i.cause for i in one if i.state == "idle"} <= {"weights", "tail", "trainer"}
    assert {event.step for event in run.of(EngineStep)} == set(range(1, 10))
    assert left_in_shared_memory() <= before


@pytest.mark.slow
def test_a_killed_run_trains_every_prompt_once(train: Train, start: Any, small_prompts: Path) -> None:
    """Killed in the second of three epochs, while later steps are generated; the rest has evaluations, too."""
    options = (*PIPELINE, *PARTIAL, "--train.num_episodes", "3", "--ckpt.save_steps", "1")
    killed = start("killed", *options)
    killed.wait_for(lambda event: isinstance(event, CheckpointSaved) and event.step == 4, "the checkpoint of step 4")
    killed.kill()
    evaluated = ("--eval.dataset", str(small_prompts), "--eval.steps", "2")
    resumed = train(*options, *evaluated, "--ckpt.load_enable")
    assert resumed.code == 0, resumed.output
    trained = [event.step for event in resumed.of(TrainStep)]
    first = trained[0]
    assert first >= 5 and trained == list(range(first, 10))
    assert any(f"after step {first - 1}" in event.text for event in resumed.of(Note))
    assert [event.step for event in resumed.of(Evaluation)] == [step for step in (6, 8) if first <= step < 8]
    journal = [entry for entry in journal_prompts(killed.path) if entry[0] < first]
    journal += [entry for entry in journal_prompts(resumed.path) if entry[0] >= first]
    trained_once(journal, set(range(1, 10)), epochs=3)


HANGING_REWARD = """
import time

from rhyme_openrlhf.embedded.reward import reward_func as right


def reward_func(queries, prompts, labels, **kwargs):
    if prompts[0] == {prompt!r}:
        time.sleep(60)
    return right(queries, prompts, labels, **kwargs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--move.enable", "--move.news_s", "0.1")], ids=["", "moves"])
def test_a_run_goes_on_without_an_engine_and_without_a_reward(
    train: Train, tmp_path: Path, small_prompts: Path, more: tuple[str, ...]
) -> None:
    """An engine is killed in the middle of step 4; one prompt's reward hangs, always. Prompt groups may be deferred,
    and there is a critic."""
    hanging = json.loads(small_prompts.read_text().splitlines()[2])["input"]
    reward = tmp_path / "reward.py"
    reward.write_text(HANGING_REWARD.format(prompt=hanging))
    killer = threading.Thread(target=kill_one_in_step, args=(4, tmp_path / "run", tmp_path), daemon=True)
    killer.start()
    critic = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "1")
    critic += ("--critic.model_name_or_path", str(embedded.MODEL))
    run = train(
        *PIPELINE, *PARTIAL, *critic, *more, "--train.num_episodes", "3", "--histopipe.defer",
        "--rollout.temperature", "1.3", "--reward.remote_url", str(reward), "--limits.reward_s", "2",
    )  # fmt: skip
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    trained = run.of(TrainStep)
    assert [event.step for event in trained] == list(range(1, 10))
    # Each epoch trains its prompts once, but for the one that never has a reward: that is said, and counted.
    journal = journal_prompts(run.path)
    for epoch in range(3):
        drawn = [prompt for step, prompt in journal if (step - 1) // 3 == epoch]
        assert len(drawn) == len(set(drawn)) == 7, (epoch, drawn)
    texts = [event.text for event in run.of(Note)]
    for model in ("policy", "critic"):
        updates = [
            (event.metrics[f"{model}/optimizer_steps"], event.metrics[f"{model}/micro_batches"]) for event in trained
        ]
        assert updates == [(event.samples / 4, event.samples / 2) for event in run.of(RolloutFinished)]
    assert any("(3 left out in this run)" in text and "within 2 s" in text for text in texts)
    assert trained[-1].metrics["pipeline/excluded_prompt_groups"] == 3
    # The other engine generated all that the lost engine owed, of every step.
    (lost,) = {event.engine for event in run.of(EngineStep)} - {e.engine for e in run.of(EngineStep) if e.step == 9}
    assert any(f"the run goes on without engine {lost}" in text for text in texts)
    assert sum(event.samples for event in run.of(RolloutFinished)) == 3 * 7 * 4
    # Only what was deferred is two steps off policy.
    deferred = sum(event.metrics["pipeline/deferred_prompt_groups"] for event in trained)
    oldest = sum(
        count for e in run.of(OffPolicyness) for age, count in zip(e.values, e.samples, strict=True) if age == 2
    )
    assert oldest <= 4 * deferred
    assert all("critic_loss" in event.metrics for event in trained)


# Of three prompts, one sample of four is longer every time the prompt comes; all others have few tokens.
GROWING = """
import os

from openrlhf.utils.agent import SingleTurnAgentExecutor
from rhyme_openrlhf import embedded

LONG = {long!r}


class AgentExecutor(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__(str(embedded.REWARD))

    async def execute(self, prompt, label, sampling_params, *arguments, **named):
        parameters = sampling_params.clone()
        parameters.max_tokens, parameters.ignore_eos = 8, True
        if prompt in LONG:
            call = self.number(LONG.index(prompt))
            if call % 4 == 0:
                parameters.max_tokens = (20, 150, 400)[min(call // 4, 2)] + 100 * LONG.index(prompt)
        return await super().execute(prompt, label, parameters, *arguments, **named)

    def number(self, prompt):
        for number in range(1000):
            try:
                os.close(os.open(f"{seen}/{{prompt}}-{{number}}", os.O_CREAT | os.O_EXCL))
                return number
            except FileExistsError:
                continue
"""


@pytest.mark.slow
def test_far_too_long_responses_train_a_step_later_also_when_the_run_is_killed(
    train: Train,
    start: Any,
    tmp_path: Path,
    small_prompts: Path,
) -> None:
    prompts = [json.loads(line)["input"] for line in small_prompts.read_text().splitlines()]
    (tmp_path / "seen").mkdir()
    agent = tmp_path / "agent.py"
    agent.write_text(GROWING.format(long=prompts[:3], seen=tmp_path / "seen"))
    options = (
        *PIPELINE, *PARTIAL, "--train.num_episodes", "3", "--ckpt.save_steps", "1", "--histopipe.defer",
        "--train.agent_func_path", str(agent), "--data.max_len", "760", "--rollout.max_new_tokens", "640",
    )  # fmt: skip
    killed = start("killed", *options)
    killed.wait_for(lambda event: isinstance(event, CheckpointSaved) and event.step == 5, "the checkpoint of step 5")
    killed.kill()
    resumed = train(*options, "--ckpt.load_enable")
    assert resumed.code == 0, resumed.output
    trained = [event.step for event in resumed.of(TrainStep)]
    first = trained[0]
    assert first >= 6 and trained == list(range(first, 10))
    journal = [entry for entry in journal_prompts(killed.path) if entry[0] < first]
    journal += [entry for entry in journal_prompts(resumed.path) if entry[0] >= first]
    trained_once(journal, set(range(1, 10)), epochs=3)
    events = [*killed.events(), *resumed.events]
    moved = [event for event in events if isinstance(event, SampleMoved)]
    assert moved and {event.cause for event in moved} == {"outlier_inter"}
    # In the last step of an epoch nothing is deferred.
    assert {event.step % 3 for event in moved} <= {1, 2}
    for run in (killed.events(), resumed.events):
        deferred = {0: 0.0}
        for event in run:
            if isinstance(event, TrainStep):
                deferred[event.step] = event.metrics["pipeline/deferred_prompt_groups"]
        for event in run:
            if isinstance(event, OffPolicyness):
                ages = dict(zip(event.values, event.samples, strict=True))
                assert set(ages) <= {0, 1, 2}
                # What a resumed run begins with was deferred by the one before, and is generated anew.
                assert ages.get(2, 0) <= 4 * deferred.get(event.step - 1, 0)
