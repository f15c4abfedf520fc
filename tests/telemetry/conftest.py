"""A small run, as the tests of displays and summaries see it."""

from collections.abc import Sequence

import pytest

from rhyme_openrlhf.telemetry.events import (
    SCHEMA_VERSION,
    CheckpointSaved,
    EngineInterval,
    EngineStep,
    Evaluation,
    Event,
    Note,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters

# Unix seconds of the first event; any number does, a large one shows rounding errors.
START = 1_700_000_000.0
SAMPLES = 96
RUN = RunStarted(
    schema_version=SCHEMA_VERSION,
    name="demo",
    command=["rhyme", "train"],
    engines=2,
    tensor_parallel_size=1,
    epochs=2,
    steps_per_epoch=2,
    prompts_per_step=12,
    samples_per_prompt=8,
    asynchronous=False,
)


def record(timed: Sequence[tuple[float, Event]]) -> list[Recorded]:
    """Events with the seconds after the start at which they happened, as one source's record."""
    return [Recorded(event, START + after, "driver", number) for number, (after, event) in enumerate(timed)]


def one_step(step: int, epoch: int, begin: float, *, reward: float, accepted: int) -> list[tuple[float, Event]]:
    """A rollout of 12 s with a 2 s tail on engine 1, then 3 s of training. `accepted` of 2,000 draft tokens."""
    tokens = 9_600
    counters = EngineCounters(
        response_tokens=tokens // 2,
        decode_tokens=tokens // 2 - SAMPLES // 2,
        decode_steps=100,
        sample_steps=tokens // 2 - SAMPLES // 2 - accepted // 2,
        drafts=500,
        drafted=1_000 if accepted else 0,
        accepted=accepted // 2,
        busy_seconds=10.0,
        finished_samples=SAMPLES // 2,
    )
    finished = RolloutFinished(step, epoch, 12.0, SAMPLES, tokens, reward, 100.0, 98.0, 180.0, 256, 3)
    drafted = 2_000 if accepted else 0
    at = START + begin
    return [
        (begin, RolloutStarted(step, epoch, 12, SAMPLES)),
        (begin + 5, RolloutProgress(step, 20, SAMPLES, 4_000, 5.0, drafted // 2, accepted // 2)),
        (begin + 11, RolloutProgress(step, 61, SAMPLES, 8_800, 11.0, drafted, accepted)),
        (begin + 11.5, RolloutProgress(step, 70, SAMPLES, 9_200, 11.5, drafted, accepted)),
        (begin + 12, EngineInterval(0, "sync", at - 1, at + 1, step)),
        (begin + 12, EngineInterval(0, "generate", at + 1, at + 12, step)),
        (begin + 12, EngineInterval(1, "generate", at, at + 10, step)),
        (begin + 12, finished),
        (begin + 12, EngineStep(step, 0, counters, step - 1)),
        (begin + 12, EngineStep(step, 1, counters, step - 1)),
        (begin + 15, TrainStep(step, epoch, {"rollout": 12.0, "train": 2.5, "publish": 0.5}, {"policy_loss": 0.1})),
        (begin + 15, WeightsPublished(step, 0.5, 1_000_000, 2)),
        # The engine learns that it idled until the end, and of the wait for the trainer, with the next stage.
        (begin + 15, EngineInterval(1, "idle", at + 10, at + 12, step, cause="tail")),
        (begin + 15, EngineInterval(1, "idle", at + 12, at + 15, step, cause="trainer")),
    ]


@pytest.fixture
def finished_run() -> list[Recorded]:
    """Two epochs of two steps; rewards 0.25, 0.35, 0.4, 0.6; the first epoch drafts nothing."""
    return record(
        [
            (0.0, Note("info", "starting 2 engines ...")),
            (4.0, RUN),
            *one_step(1, 1, 5.0, reward=0.25, accepted=0),
            *one_step(2, 1, 20.0, reward=0.35, accepted=0),
            (35.0, Evaluation(2, {"pass1": 0.5})),
            *one_step(3, 2, 36.0, reward=0.4, accepted=1_400),
            (51.0, Note("warning", "history worker 0\nis late")),
            *one_step(4, 2, 52.0, reward=0.6, accepted=1_600),
            (68.0, CheckpointSaved(4, "checkpoints/step-4")),
            (70.0, RunFinished("succeeded", "", 66.0)),
        ]
    )
