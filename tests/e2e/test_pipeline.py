"""The streaming pipeline as a user runs it: every prompt of every epoch trained once, whatever engine was ahead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from rhyme_openrlhf.telemetry.events import (
    EngineInterval,
    EngineStep,
    Evaluation,
    Note,
    OffPolicyness,
    RankGroups,
    RolloutFinished,
    RunFinished,
    TrainStep,
    WeightsChecked,
    WeightsLoaded,
)

from .conftest import RUN_TIMEOUT_S, FinishedRun
from .test_resume import journal_prompts
from .test_training import EVERY_SYNC, SAME_LOG_PROBABILITY, shared_memory

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]

Train = Callable[..., FinishedRun]
PIPELINE = ("--train.async_enable", "--histopipe.enable", "--no-run.reproducible", "--latency.profile", "none")
# Eight prompts in batches of three: each epoch's last step is a partial one.
PARTIAL = (
    "--rollout.batch_size",
    "3",
    "--train.batch_size",
    "4",
    "--rollout.micro_batch_size",
    "4",
    "--train.micro_batch_size",
    "4",
)


def trained_once(journal: list[tuple[int, str]], steps: set[int], epochs: int) -> None:
    """Every prompt once in each epoch of three steps, as far as the epoch is in `steps`."""
    for epoch in range(epochs):
        drawn = [prompt for step, prompt in journal if step in steps and (step - 1) // 3 == epoch]
        assert len(drawn) == len(set(drawn)) == 8, (epoch, drawn)


def test_three_epochs(train: Train) -> None:
    before = shared_memory()
    reference = ("--algo.kl.init_coef", "0.01")
    run = train(*PIPELINE, *PARTIAL, "--train.num_episodes", "3", *EVERY_SYNC, *reference)
    assert run.code == 0, run.output
    assert [event.status for event in run.of(RunFinished)] == ["succeeded"]
    assert [(event.step, event.epoch) for event in run.of(TrainStep)] == [(n, (n + 2) // 3) for n in range(1, 10)]
    trained_once(journal_prompts(run.path), set(range(1, 10)), epochs=3)
    samples = [12, 12, 8] * 3
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
    assert checked and max(event.max_difference for event in checked) < SAME_LOG_PROBABILITY

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
    assert shared_memory() == before


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_with_evaluations_and_a_critic(train: Train) -> None:
    options = (*PIPELINE, *PARTIAL, "--train.num_episodes", "2", "--ckpt.save_steps", "1")
    first = train(*options, name="first")
    assert first.code == 0, first.output
    resumed = train(*options, "--train.num_episodes", "4", "--ckpt.load_enable", "--eval.steps", "2",
                    "--eval.dataset", first_prompts(first), name="resumed")  # fmt: skip
    assert resumed.code == 0, resumed.output
    assert any("after step 6" in event.text for event in resumed.of(Note))
    assert [event.step for event in resumed.of(TrainStep)] == list(range(7, 13))
    assert [event.step for event in resumed.of(Evaluation)] == [8, 10]
    journal = [entry for entry in journal_prompts(first.path) if entry[0] <= 6]
    journal += [entry for entry in journal_prompts(resumed.path) if entry[0] > 6]
    trained_once(journal, set(range(1, 13)), epochs=4)


def first_prompts(run: FinishedRun) -> str:
    """The data set that a run was trained on."""
    import json

    return str(json.loads((run.path / "config.json").read_text())["arguments"]["data"]["prompt_dataset"])
