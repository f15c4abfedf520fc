"""The phases of a run, from its events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry.events import (
    POLICY,
    CheckpointSaved,
    Evaluation,
    Event,
    Measuring,
    ProcessReady,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    StageStarted,
    TrainStep,
    WeightsLoaded,
)
from rhyme_openrlhf.telemetry.phase import Phase, phases, usual_seconds
from tests.examples import examples

RUN = RunStarted(1, "demo", [], 2, 1, 2, 4, 12, 8, False)
READY = (ProcessReady("engine 0"), ProcessReady("engine 1"), ProcessReady(POLICY))
GENERATING = RolloutProgress(3, 40, 96, 900, 12.0, 0, 0, "3fa9c1d2" + 24 * "0", 1, 812)


def timed(*events: Event | tuple[float, Event]) -> list[Recorded]:
    """These events, a second apart or at given seconds."""
    found, at = [], 0.0
    for number, one in enumerate(events):
        at, event = one if isinstance(one, tuple) else (at + 1.0, one)
        found.append(Recorded(event, at, "driver", number))
    return found


def labels(*events: Event) -> list[str]:
    return [phase.label for phase in phases(timed(*events))]


def finished(step: int, seconds: float = 5.0) -> RolloutFinished:
    return RolloutFinished.of(step, 1, seconds, [3, 4], [], 0)


def test_a_run_without_events_starts_ray() -> None:
    assert phases([], begun=7.0) == [Phase("starting Ray and the driver", 7.0)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([RUN], ["starting engines: 0 of 2", "loading the policy model"]),
        # An engine that is there twice counts once.
        ([RUN, READY[0], READY[0]], ["starting engines: 1 of 2", "loading the policy model"]),
        ([RUN, READY[2]], ["starting engines: 0 of 2"]),
        ([RUN, READY[0], READY[1]], ["loading the policy model"]),
        ([RUN, *READY], ["preparing the first rollout"]),
        ([RUN, *READY, ProcessReady("engine 2")], ["preparing the first rollout"]),
        ([RUN, *READY, Measuring(0, 9), Measuring(4, 9)], ["measuring: 4 of 9 points"]),
        # An engine that is measured has started, and is found to be ready only later.
        ([RUN, READY[2], Measuring(4, 9), READY[0]], ["measuring: 4 of 9 points"]),
        ([RUN, *READY, Measuring(4, 9), Measuring(9, 9)], ["preparing the first rollout"]),
        # A record of an older writer says nothing of what starts.
        ([RUN, RolloutStarted(1, 1, 12, 96)], ["generating step 1: 0 of 96 samples"]),
        # A resumed attempt starts anew.
        ([RUN, *READY, RolloutStarted(1, 1, 12, 96), RUN], ["starting engines: 0 of 2", "loading the policy model"]),
    ],
)
def test_the_start(events: Sequence[Event], expected: list[str]) -> None:
    assert labels(*events) == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([RolloutStarted(3, 1, 12, 96), GENERATING], ["generating step 3: 40 of 96 samples"]),
        # The last look at the step before comes late.
        ([RolloutStarted(4, 1, 12, 96), GENERATING], ["generating step 4: 0 of 96 samples"]),
        ([RolloutStarted(3, 1, 12, 96), finished(3)], ["training on step 3"]),
        ([finished(3), StageStarted(3, "experience")], ["making experiences, step 3"]),
        ([finished(3), StageStarted(3, "experience"), StageStarted(3, "train")], ["training on step 3"]),
        ([StageStarted(3, "sync")], ["loading weights, step 3: 0 of 2 engines"]),
        (
            [StageStarted(3, "sync"), WeightsLoaded(2, 0, 0.1), WeightsLoaded(3, 1, 0.1)],
            ["loading weights, step 3: 1 of 2 engines"],
        ),
        ([StageStarted(3, "sync"), StageStarted(3, "check")], ["checking weights, step 3"]),
        ([StageStarted(3, "train"), TrainStep(3, 1, {}, {})], []),
        ([StageStarted(3, "checkpoint")], ["saving a checkpoint, step 3"]),
        ([StageStarted(3, "checkpoint"), CheckpointSaved(3, "x")], []),
        ([StageStarted(3, "evaluate")], ["evaluating, step 3"]),
        ([StageStarted(3, "evaluate"), Evaluation(3, {})], []),
        ([RolloutStarted(3, 1, 12, 96), RunFinished("failed", "", 9.0)], []),
    ],
)
def test_the_steps(events: Sequence[Event], expected: list[str]) -> None:
    assert labels(RUN, *READY, Measuring(9, 9), RolloutStarted(1, 1, 12, 96), finished(1), TrainStep(2, 1, {}, {}),
                  *events) == expected  # fmt: skip


def test_an_asynchronous_run_generates_and_trains() -> None:
    trains = (finished(1), StageStarted(1, "train"), RolloutStarted(2, 1, 12, 96))
    assert labels(RUN, *trains) == ["training on step 1", "generating step 2: 0 of 96 samples"]
    # Step 2 is generated before step 1 is trained on, and evaluated beside.
    ahead = (*trains, finished(2), RolloutStarted(3, 1, 12, 96), StageStarted(1, "evaluate"))
    assert labels(RUN, *ahead) == ["training on step 1", "generating step 3: 0 of 96 samples", "evaluating, step 1"]
    # Where the stage's own event was not read, the step follows from the last one that was trained on.
    assert labels(TrainStep(1, 1, {}, {}), finished(3)) == ["training on step 2"]


def test_the_sentence_has_the_count_the_time_and_the_slowest_sample() -> None:
    (phase,) = phases(timed((10.0, RUN), (20.0, RolloutStarted(3, 1, 12, 96)), (32.0, GENERATING)))
    assert phase.text(32.0) == (
        "generating step 3: 40 of 96 samples, for 12.0 s (slowest: prompt 3fa9c1d2 on engine 1, 812 tokens)"
    )
    (done,) = phases(timed(RUN, RolloutStarted(3, 1, 12, 96), RolloutProgress(3, 96, 96, 900, 12.0, 0, 0)))
    assert done.slowest == ""
    # Clocks of two machines differ.
    assert phase.text(0.0).startswith("generating step 3: 40 of 96 samples, for 0.0 s")


def earlier(engines: float, generating: float) -> list[Recorded]:
    """A run whose engines took `engines` seconds to start, and a rollout `generating`."""
    return timed(
        (0.0, RUN), (1.0, READY[2]), (engines / 2, READY[0]), (engines, READY[1]), (engines + 1, Measuring(0, 9)),
        (engines + 5, Measuring(9, 9)), (engines + 7, RolloutStarted(1, 1, 12, 96)),
        (engines + 7 + generating, finished(1, generating)), (99.0, StageStarted(1, "checkpoint")),
        (102.0, CheckpointSaved(1, "x")), (103.0, TrainStep(1, 1, {"train": 4.0, "sync": 0.5, "rollout": 1.0}, {})),
    )  # fmt: skip


def test_the_usual_time_is_the_median_of_earlier_runs() -> None:
    runs = [earlier(30.0, 8.0), earlier(40.0, 9.0), earlier(90.0, 20.0)]
    assert usual_seconds(runs) == {
        "starting engines": 40.0, "loading the policy model": 1.0, "measuring": 4.0, "preparing the first rollout": 2.0,
        "generating": 9.0, "training": 4.0, "loading weights": 0.5, "saving a checkpoint": 3.0,
    }  # fmt: skip
    (generating,) = phases(timed(RUN, (20.0, RolloutStarted(2, 1, 12, 96))), runs)
    assert generating.text(26.0) == "generating step 2: 0 of 96 samples, for 6.0 s, usually 9.0 s"
    (evaluating,) = phases(timed(StageStarted(2, "evaluate")), runs)
    assert evaluating.usual_seconds is None


def test_a_weight_check_usually_takes_the_time_to_the_next_event_of_its_step() -> None:
    # Before a step, and after another one; of the last one the next event was not read.
    run = timed(
        (0.0, StageStarted(1, "check")), (2.0, StageStarted(1, "experience")), (9.0, StageStarted(1, "check")),
        (13.0, TrainStep(1, 1, {}, {})), (14.0, StageStarted(2, "check")), (900.0, TrainStep(90, 1, {}, {})),
    )  # fmt: skip
    assert usual_seconds([run]) == {"checking weights": 3.0}


ANY = st.one_of(
    st.just(RUN),
    st.sampled_from(READY),
    st.builds(lambda done: Measuring(done, 5), st.integers(0, 5)),
    st.builds(lambda step: RolloutStarted(step, 1, 12, 96), st.integers(1, 4)),
    st.builds(lambda step, done: RolloutProgress(step, done, 96, 1, 1.0, 0, 0), st.integers(1, 4), st.integers(0, 96)),
    st.builds(finished, st.integers(1, 4)),
    st.builds(StageStarted, st.integers(1, 4), st.sampled_from(["experience", "train", "sync", "check", "evaluate"])),
    st.builds(lambda version, engine: WeightsLoaded(version, engine, 0.1), st.integers(1, 4), st.integers(0, 3)),
    st.builds(lambda step: TrainStep(step, 1, {"train": 1.0}, {}), st.integers(1, 4)),
    st.just(RunFinished("succeeded", "", 1.0)),
)


@settings(max_examples=examples(200))
@given(st.lists(ANY, max_size=40))
def test_any_record_has_sound_phases(events: list[Event]) -> None:
    record = timed(*events)
    found = phases(record, [record])
    assert len({phase.name for phase in found}) == len(found)
    for phase in found:
        assert phase.done is None or phase.total is None or 0 <= phase.done <= phase.total
        assert any(recorded.time == phase.since for recorded in record) or not record
    if isinstance(events[-1] if events else None, RunFinished):
        assert found == []
