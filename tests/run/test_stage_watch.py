"""The rule by which a run counts as stuck."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.run.stage_watch import START_UP, StageWatch
from rhyme_openrlhf.settings.run import LimitSettings
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import (
    EVENT_CLASSES,
    CheckpointSaved,
    EngineSample,
    Evaluation,
    EvaluationProgress,
    Event,
    Note,
    ProcessDied,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    StageStarted,
    SystemSample,
    TrainStep,
)
from rhyme_openrlhf.telemetry.recorder import PlainRecorder

RECORDED_RUN = Path(__file__).parents[1] / "data" / "recorded_run.jsonl"
LIMITS = LimitSettings(rollout_s=10, stage_s=100)
STARTED = RolloutStarted(1, 1, 4, 16)
FINISHED = RolloutFinished(1, 1, 5.0, 16, 100, None, 6.0, 6.0, 8.0, 9, 0)


def progress(tokens: int, done: int = 0) -> RolloutProgress:
    return RolloutProgress(1, done, 16, tokens, 1.0, 0, 0)


def watch(*events: tuple[Event, float]) -> StageWatch:
    watch = StageWatch(LIMITS, 0.0)
    for event, at in events:
        watch.observe(event, at)
    return watch


def test_start_up_has_the_limit_of_stages() -> None:
    assert watch().overdue(100) is None
    sentence = watch().overdue(101)
    assert sentence is not None and START_UP in sentence and "--limits.stage_s" in sentence


def test_notes_are_no_progress() -> None:
    assert watch((Note("info", "still here"), 99)).overdue(101) is not None


# Written by a clock while a run hangs.
TICKING = (
    SystemSample("node", 0.1, 0.2, 1, 2, 3, 4, 5, [], [], [], {}, {}),
    EngineSample(1, 0, 4, 1.0, 0, 0, 0),
    Note("info", "still here"),
    ProcessDied("history worker 0", 7, "node", "killed", True, []),
)


def test_a_kind_of_event_that_does_not_say_whether_it_is_progress_is_refused() -> None:
    with pytest.raises(TypeError, match="Undeclared declares no progress"):
        type("Undeclared", (Event,), {"kind": "undeclared"})
    assert all("progress" in vars(kind) for kind in EVENT_CLASSES)


@pytest.mark.parametrize("frozen_at", range(0, 282, 7))
def test_a_real_run_that_freezes_is_overdue_at_its_limit_while_all_else_ticks(frozen_at: int) -> None:
    """A recorded run up to some event, from which on the events of clocks come alone, every second."""
    events = [recorded.event for recorded in read_events(RECORDED_RUN)]
    sut = StageWatch(LIMITS, 0.0)
    last = next(filter(lambda event: isinstance(event, RolloutProgress), reversed(events[: frozen_at + 1])), None)
    for event in events[: frozen_at + 1]:
        sut.observe(event, 0.0)
    limit = LIMITS.rollout_s if sut.doing.startswith("the rollout") and " and " not in sut.doing else LIMITS.stage_s
    for second in range(1, int(limit) + 2):
        assert sut.overdue(second) is None or second > limit
        for event in (*TICKING, *([last] if last and sut.doing.startswith("the rollout") else [])):
            sut.observe(event, float(second))
    assert sut.overdue(limit + 1) is not None


@pytest.mark.parametrize("full_from", range(0, 282, 40))
def test_a_real_run_whose_disk_stays_full_is_judged_by_the_events_that_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_from: int
) -> None:
    """Never overdue while the run goes on, and overdue at its limit once it freezes."""
    recorder = PlainRecorder(str(tmp_path / "events.jsonl"))
    watched, freezes = StageWatch(LIMITS, 0.0), StageWatch(LIMITS, 0.0)
    second, seen, frozen_at = 0.0, 0, full_from + 100
    for number, recorded in enumerate(read_events(RECORDED_RUN)):
        if number == full_from:
            monkeypatch.setattr(recorder._log, "_append", refuse)
        second += 0.1
        recorder.write(recorded.event, recorded.source, recorded.time)
        written = [one.event for one in read_events(tmp_path / "events.jsonl")]
        for event in (*written[seen:], *recorder.take_lost()):
            watched.observe(event, second)
            if number < frozen_at:
                freezes.observe(event, second)
        seen = len(written)
        assert watched.overdue(second + LIMITS.rollout_s / 2) is None
    assert seen == full_from
    assert freezes.overdue(second + LIMITS.stage_s + 1) is not None


def refuse(data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_rollout_without_a_token_is_stuck() -> None:
    stuck = watch((STARTED, 50), (progress(7), 55), (progress(7), 64))
    assert stuck.overdue(65) is None
    sentence = stuck.overdue(66)
    assert sentence is not None and "the rollout of step 1" in sentence and "--limits.rollout_s" in sentence


def test_tokens_and_finished_samples_are_progress() -> None:
    moving = watch((STARTED, 50), (progress(7), 55), (progress(7, done=1), 64), (progress(9, done=1), 73))
    assert moving.overdue(83) is None
    assert moving.overdue(84) is not None


def test_an_event_that_arrives_with_an_earlier_time_takes_no_progress_back() -> None:
    seen = watch((STARTED, 0), (progress(10), 50), (progress(20), 45))
    assert seen.overdue(60) is None and seen.overdue(61) is not None


def test_training_beside_a_rollout_has_the_limit_of_stages() -> None:
    both = watch((STARTED, 0), (StageStarted(1, "train"), 0))
    assert both.doing == "the rollout of step 1 and the training of step 1"
    assert both.overdue(50) is None
    assert both.overdue(101) is not None


def test_counts_that_go_back_and_come_again_are_no_progress() -> None:
    stuck = watch((STARTED, 50), (progress(7), 55), (progress(5), 59), (progress(7), 64))
    assert stuck.overdue(65) is None and stuck.overdue(66) is not None


def test_an_evaluation_that_generates_goes_on_and_one_that_hangs_has_the_limit_of_rollouts() -> None:
    evaluating = watch((TrainStep(2, 1, {}, {}), 0), (StageStarted(2, "evaluate"), 1))
    for second in range(2, 500, 9):
        assert evaluating.overdue(second) is None
        evaluating.observe(EvaluationProgress(2, 0, second, 1.0), second)
        for event in TICKING:
            evaluating.observe(event, second + 8)
    sentence = evaluating.overdue(508.5)
    assert sentence is not None and "the evaluation of step 2" in sentence and "--limits.rollout_s" in sentence
    evaluating.observe(Evaluation(2, {}), 509)
    assert "controller" in evaluating.doing and evaluating.overdue(520) is None


def test_stages_end() -> None:
    after = watch((STARTED, 0), (FINISHED, 5), (StageStarted(1, "train"), 6), (TrainStep(1, 1, {}, {}), 9))
    assert "controller" in after.doing
    saved = watch((StageStarted(1, "checkpoint"), 6), (CheckpointSaved(1, "/x"), 9))
    assert "controller" in saved.doing


@given(st.lists(st.tuples(st.sampled_from([STARTED, FINISHED, progress(1), progress(2)]), st.floats(0, 50))))
def test_never_overdue_within_the_shorter_limit_of_the_last_progress(events: list[tuple[Event, float]]) -> None:
    events.sort(key=lambda pair: pair[1])
    sut = watch(*events)
    if sut.overdue(60.0) is not None:
        # Passed limits stay passed, until something happens.
        assert sut.overdue(70.0) is not None
        sut.observe(StageStarted(2, "train"), 70.0)
        assert sut.overdue(70.0) is None
