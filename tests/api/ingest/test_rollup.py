"""Rows made of events, without a store."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rhyme_openrlhf.api.ingest.rollup import (
    ENGINE_STEP_COUNTERS,
    INTERVAL_COLUMNS,
    MOVE_COLUMNS,
    SAMPLE_COLUMNS,
    STEP_COLUMNS,
    SWITCH_COLUMNS,
    Rollup,
    claimed_steps,
    planned_steps,
    segment,
    steps_concerned,
)
from rhyme_openrlhf.api.ingest.totals import EPOCH_SUMS, QUANTUM, epoch_changes, quantised, run_figures
from rhyme_openrlhf.api.ingest.validation import Arrived
from rhyme_openrlhf.api.store.record import EngineSampleRow, EngineStepRow, EpochRow, Interval, Move, Step, Switch
from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    EngineInterval,
    EngineStep,
    Evaluation,
    Event,
    RankStability,
    RolloutFinished,
    RolloutStarted,
    RunStarted,
    TrainStep,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters

BEGIN = 1_700_000_000.0
STARTED = RolloutStarted(1, 1, 4, 32)
FINISHED = RolloutFinished(1, 1, 10.0, 32, 900, 0.5, 1.0, 1.0, 1.0, 1, 0)
TAIL = EngineInterval(0, "idle", BEGIN + 8, BEGIN + 12, 1, None, "tail")
UNEXPLAINED = EngineInterval(1, "idle", BEGIN - 5, BEGIN + 1, 1)
SYNC = EngineInterval(1, "sync", BEGIN + 1, BEGIN + 1.5, 1)
BUSY = EngineInterval(1, "generate", BEGIN + 2, BEGIN + 9, 1)


def arrived(*events: Event) -> list[Arrived]:
    return [Arrived(event.kind, BEGIN, "rollout", number, "{}", event) for number, event in enumerate(events)]


def roll_up(*events: Event, ceiling: int | None = None, stored: dict[int, Any] | None = None) -> Rollup:
    rollup = Rollup(7, 8, ceiling, stored or {})
    rollup.add(arrived(*events))
    rollup.settle_bubbles({})
    return rollup


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        (Step, STEP_COLUMNS),
        (Interval, INTERVAL_COLUMNS),
        (EngineSampleRow, SAMPLE_COLUMNS),
        (Move, MOVE_COLUMNS),
        (Switch, SWITCH_COLUMNS),
        (EpochRow, ("run_id", "epoch", *EPOCH_SUMS)),
        (EngineStepRow, ("run_id", "step", "engine", "attempt_id", "weight_version", *ENGINE_STEP_COUNTERS)),
    ],
)
def test_every_column_is_written(table: Any, columns: tuple[str, ...]) -> None:
    assert set(table.__table__.c.keys()) - {"id"} == set(columns)


@pytest.mark.parametrize("order", itertools.permutations([STARTED, FINISHED, TAIL, UNEXPLAINED, SYNC]))
def test_bubbles_are_those_inside_the_stage_whenever_it_becomes_known(order: tuple[Event, ...]) -> None:
    """In one batch, and one event at a time."""
    whole = roll_up(*order, BUSY).steps[1]
    stored: dict[int, Any] = {}
    seen: list[EngineInterval] = []
    for event in (*order, BUSY):
        rollup = Rollup(7, 8, None, stored)
        rollup.add(arrived(event))
        earlier = [segment(one.state, one.cause, one.start, one.end) for one in seen]
        rollup.settle_bubbles({step: earlier for step in rollup.needs_intervals()})
        stored = {**stored, **rollup.steps}
        seen += [event] if isinstance(event, EngineInterval) else []
    assert stored[1] == whole
    bubbles = {name: whole[name] for name in whole if name.startswith("bubble_") and whole[name]}
    assert bubbles == {"bubble_tail": 2.0, "bubble_unexplained": 1.0, "bubble_sync": 0.5}
    assert whole["intervals"] == 4


def test_an_unfinished_stage_has_no_bubbles_yet() -> None:
    assert roll_up(STARTED, TAIL).steps[1]["bubble_tail"] == 0.0


def test_intervals_without_a_moment_are_left_out() -> None:
    rollup = roll_up(STARTED, FINISHED, structs.replace(TAIL, end=math.nan))
    assert rollup.intervals == [] and rollup.steps[1]["intervals"] == 0


def test_what_a_newer_attempt_does_gets_nothing() -> None:
    checkpoint = CheckpointSaved(5, "c")
    rollup = roll_up(STARTED, structs.replace(STARTED, step=3), Evaluation(4, {"a": 1.0}), checkpoint, ceiling=3)
    assert sorted(rollup.steps) == [1] and rollup.metrics == rollup.new_metrics == {}
    assert list(rollup.checkpoints) == [(5, "c")]


def test_who_claims_a_step() -> None:
    """What is said of the state after a step does not say that the attempt does it."""
    events = arrived(
        Evaluation(1, {}), CheckpointSaved(2, "c"), RankStability(1, 0.5, 3), structs.replace(TAIL, step=9)
    )
    assert claimed_steps(events) == steps_concerned(events) == {9}


def test_two_parts_of_one_engines_step_are_added() -> None:
    part = EngineStep(1, 0, EngineCounters(response_tokens=5, busy_seconds=0.5), 3)
    rollup = roll_up(part, part, structs.replace(part, engine=1))
    assert rollup.engine_steps[1, 0][:2] == [3, 10]
    assert rollup.steps[1]["engine_tokens"] == 15 and rollup.steps[1]["busy_seconds"] == 1.5


def test_numbers_that_are_none_are_null() -> None:
    rollup = roll_up(TrainStep(1, 1, {"train": math.inf}, {"reward": math.nan, "loss": 1.0}))
    assert rollup.steps[1]["train_seconds"] is rollup.steps[1]["reward"] is None
    assert rollup.new_metrics == {("reward", 1): None, ("loss", 1): 1.0}


def test_only_metrics_that_can_meet_no_stored_ones_are_new() -> None:
    first = TrainStep(1, 1, {}, {"loss": 1.0, "eval/pass1": 2.0})
    again = TrainStep(1, 1, {}, {"loss": 3.0})
    rollup = roll_up(first, again, Evaluation(1, {"pass1": 4.0}))
    assert rollup.new_metrics == {("loss", 1): 1.0}
    assert rollup.metrics == {("loss", 1): 3.0, ("eval/pass1", 1): 4.0}


def test_planned_steps_that_no_column_holds_are_unknown() -> None:
    run = RunStarted(1, "n", [], 1, 1, 2, 3, 4, 5, False)
    assert planned_steps(run) == 6
    assert planned_steps(structs.replace(run, epochs=2**31 - 1)) is None
    assert planned_steps(structs.replace(run, steps_per_epoch=None)) is None


# Together below 2^33, as far as sums are exact.
seconds = st.floats(0, 2.0**28).map(quantised)


@given(st.lists(seconds, max_size=30), st.randoms(use_true_random=False))
def test_sums_of_quantised_seconds_are_exact_in_any_order(values: list[float], random: Any) -> None:
    shuffled = random.sample(values, len(values))
    assert sum(values) == sum(shuffled) == math.fsum(values)
    assert sum(values) - sum(shuffled[:5]) == math.fsum(shuffled[5:])


@given(st.floats(-(2.0**31), 2.0**31))
def test_quantised_is_the_nearest_multiple(value: float) -> None:
    assert abs(quantised(value) - value) <= QUANTUM / 2
    assert quantised(quantised(value)) == quantised(value)


def test_a_step_whose_epoch_becomes_known_moves_there() -> None:
    before = roll_up(EngineStep(1, 0, EngineCounters(response_tokens=5), 0)).steps[1]
    after = roll_up(STARTED, FINISHED, stored={1: before}).steps[1]
    changes = epoch_changes([before], [after])
    assert changes[0]["steps_begun"] == -1 and changes[1]["steps_begun"] == 1
    assert changes[0]["engine_tokens"] == -5 and changes[1]["engine_tokens"] == 5
    assert changes[1]["reward_sum"] == 16.0


def test_a_reward_that_is_no_number_or_absurd_counts_for_no_mean() -> None:
    for reward in (math.nan, 1e300):
        row = roll_up(structs.replace(FINISHED, reward_mean=reward)).steps[1]
        assert epoch_changes([], [row])[1]["rewarded_samples"] == 0


def test_a_run_that_did_nothing_has_no_figures() -> None:
    assert run_figures([], None) == {
        "epoch": 0, "reward": None, "tokens_per_second": None, "speculation_rate": None, "bubble_fraction": None
    }  # fmt: skip
