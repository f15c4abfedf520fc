"""Derived rows of a batch's events: pure.

`api/ingest/store_batch.py` reads the stored rows of the concerned steps and writes the result.

Invariants:

- Events of one kind about one step (and engine) come from one source and are applied in that source's order. The rows
  therefore do not depend on the interleaving of sources or on the split into batches.
- Steps from `ceiling` on belong to a newer attempt and are ignored.
- `telemetry/metrics.py` computes rates and bubbles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rhyme_openrlhf.api.ingest.totals import BUBBLE_COLUMNS, COUNTER_COLUMNS, finite, quantised, stage_of
from rhyme_openrlhf.api.ingest.validation import EVALUATION_PREFIX, Arrived
from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.events import (
    INT32_MAX,
    REWARD_METRIC,
    CheckpointSaved,
    EngineInterval,
    EngineSample,
    EngineStep,
    Evaluation,
    Event,
    LayoutSwitched,
    RankStability,
    RolloutFinished,
    RolloutStarted,
    RunFinished,
    RunStarted,
    SampleMoved,
    TrainStep,
)
from rhyme_openrlhf.telemetry.metrics import SECONDS

# Events that show that an attempt does a step. Evaluations and checkpoints are about the state after a step, which a
# resumed attempt has without repeating the step.
CLAIMING = (
    RolloutStarted, RolloutFinished, EngineStep, EngineInterval, EngineSample, TrainStep, SampleMoved, LayoutSwitched,
)  # fmt: skip
# Events that change a step's row.
_OF_STEP = (RolloutStarted, RolloutFinished, EngineStep, EngineInterval, TrainStep, SampleMoved, LayoutSwitched)

# Longest path of a checkpoint that has a row. The row is found by it, and an entry of PostgreSQL's indexes has at most
# 2,704 bytes. The event of a longer one is stored as any other.
PATH_BYTES = 2000

INTERVAL_COLUMNS = ("run_id", "attempt_id", "step", "engine", "state", "cause", "start", "end", "weight_version")
SAMPLE_COLUMNS = (
    "run_id", "attempt_id", "time", "step", "engine", "running", "tokens_per_second", "drafted", "accepted",
    "kv_cache",
)  # fmt: skip
MOVE_COLUMNS = (
    "run_id", "attempt_id", "time", "step", "sample", "source_engine", "destination_engine", "cause", "carrier",
    "outcome", "seconds", "tokens", "downtime_seconds", "predicted_seconds",
)  # fmt: skip
SWITCH_COLUMNS = ("run_id", "attempt_id", "time", "step", "node", "from_tp", "to_tp", "samples", "seconds")
ENGINE_STEP_COUNTERS = (
    "response_tokens", "decode_tokens", "decode_steps", "sample_steps", "drafted", "accepted", "busy_seconds"
)  # fmt: skip

_STEP_SUMS = (*COUNTER_COLUMNS.values(), *BUBBLE_COLUMNS, "engines", "intervals", "moves", "switches")
_STEP_FACTS = (
    "epoch", "started_at", "finished_at", "rollout_seconds", "samples", "response_tokens", "rollout_reward",
    "length_mean", "length_median", "length_p95", "length_max", "truncated", "experience_seconds", "train_seconds",
    "sync_seconds", "reward",
)  # fmt: skip
STEP_COLUMNS = ("run_id", "step", "attempt_id", *_STEP_FACTS, *_STEP_SUMS)

StepRow = dict[str, Any]


class Segment(NamedTuple):
    """The part of an interval that bubbles need, in quantised unix seconds (a `metrics.Interval`)."""

    state: str
    cause: str
    start: float
    end: float


def segment(state: str, cause: str, start: float, end: float) -> Segment:
    """Return a segment with quantised times."""
    return Segment(state, cause, quantised(start), quantised(end))


def claimed_steps(arrived: Iterable[Arrived]) -> set[int]:
    """Return the steps that these events claim for their attempt."""
    return {event.step for one in arrived if isinstance(event := one.event, CLAIMING)}


def steps_concerned(arrived: Iterable[Arrived]) -> set[int]:
    """Return the steps whose rows these events change."""
    return {event.step for one in arrived if isinstance(event := one.event, _OF_STEP)}


class Rollup:
    """Derived rows of one batch of one attempt: `add` its events, then `settle_bubbles`, then read the rows."""

    def __init__(self, run_id: int, attempt_id: int, ceiling: int | None, stored: Mapping[int, StepRow]) -> None:
        """Start from `stored`, the attempt's stored step rows by step, which are copied. `ceiling`: see the module."""
        self._ids = (run_id, attempt_id)
        self._ceiling = INT32_MAX + 1 if ceiling is None else ceiling
        self._stored = stored
        self.steps: dict[int, StepRow] = {}
        self.engine_steps: dict[tuple[int, int], list[Any]] = {}
        self.intervals: list[tuple[Any, ...]] = []
        self.samples: list[tuple[Any, ...]] = []
        self.moves: list[tuple[Any, ...]] = []
        self.switches: list[tuple[Any, ...]] = []
        # Metrics of a step's first TrainStep are new; others may replace stored ones.
        self.new_metrics: dict[tuple[str, int], float | None] = {}
        self.metrics: dict[tuple[str, int], float | None] = {}
        self.stability: dict[int, tuple[float | None, int]] = {}
        self.checkpoints: dict[tuple[int, str], float] = {}
        self.started: tuple[RunStarted, float] | None = None
        self.finished: tuple[RunFinished, float] | None = None
        self._segments: dict[int, list[Segment]] = defaultdict(list)
        self._restaged: set[int] = set()

    def add(self, arrived: Iterable[Arrived]) -> None:
        """Add events, each source's in order."""
        ceiling = self._ceiling
        for one in arrived:
            event = one.event
            take = _TAKE.get(type(event))
            if take is not None and getattr(event, "step", -1) < ceiling:
                take(self, event, one.time)
        # A checkpoint stays, even if another attempt repeats its step.
        for one in arrived:
            if isinstance(one.event, CheckpointSaved) and len(one.event.path.encode()) <= PATH_BYTES:
                self.checkpoints.setdefault((one.event.step, one.event.path), one.time)

    def needs_intervals(self) -> list[int]:
        """Return the steps whose rollout stage has new bounds and which have intervals of earlier batches."""
        return sorted(step for step in self._restaged if self._stored.get(step, {}).get("intervals"))

    def settle_bubbles(self, earlier: Mapping[int, Sequence[Segment]]) -> None:
        """Compute the steps' bubbles; `earlier` has the stored segments of `needs_intervals()`."""
        for step in sorted(self._restaged | set(self._segments)):
            row = self.steps[step]
            stage = stage_of(row)
            if stage is None:
                continue
            segments: list[Segment] = self._segments.get(step, [])
            if step in self._restaged:
                segments = [*earlier.get(step, ()), *segments]
                row.update(dict.fromkeys(BUBBLE_COLUMNS, 0.0))
            for cause, seconds in metrics.bubble_seconds(_cut(segments, *stage)).items():
                row[f"bubble_{cause}"] += seconds

    def changed_steps(self) -> list[StepRow]:
        """Return the step rows to write."""
        return [self.steps[step] for step in sorted(self.steps)]

    def is_new(self, step: int) -> bool:
        """Return True if nothing of this step is stored; rows of older attempts were removed before."""
        return step not in self._stored

    def _step(self, step: int) -> StepRow:
        row = self.steps.get(step)
        if row is None:
            stored = self._stored.get(step)
            row = self.steps[step] = new_step(*self._ids, step) if stored is None else dict(stored)
        return row

    def _take_rollout_started(self, event: RolloutStarted, time: float) -> None:
        self._step(event.step).update(epoch=event.epoch, started_at=time)
        self._restaged.add(event.step)

    def _take_rollout_finished(self, event: RolloutFinished, time: float) -> None:
        self._step(event.step).update(
            epoch=event.epoch,
            rollout_seconds=finite(event.seconds),
            samples=event.samples,
            response_tokens=event.response_tokens,
            rollout_reward=finite(event.reward_mean),
            length_mean=finite(event.length_mean),
            length_median=finite(event.length_median),
            length_p95=finite(event.length_p95),
            length_max=event.length_max,
            truncated=event.truncated,
        )
        self._restaged.add(event.step)

    def _take_engine_step(self, event: EngineStep, time: float) -> None:
        # Use getattr, because a counter that the writer did not have is a default of the class, not of the object.
        counters = {name: getattr(event.counters, name) for name in COUNTER_COLUMNS}
        row = self._step(event.step)
        for name, column in COUNTER_COLUMNS.items():
            row[column] += quantised(counters[name]) if name in SECONDS else counters[name]
        amounts = [quantised(counters[n]) if n in SECONDS else counters[n] for n in ENGINE_STEP_COUNTERS]
        known = self.engine_steps.get((event.step, event.engine))
        if known is not None:
            amounts = [a + b for a, b in zip(known[1:], amounts, strict=True)]
        self.engine_steps[event.step, event.engine] = [event.weight_version, *amounts]

    def _take_interval(self, event: EngineInterval, time: float) -> None:
        row = self._step(event.step)
        if finite(event.start) is None or finite(event.end) is None:
            return
        row["intervals"] += 1
        self._segments[event.step].append(segment(event.state, event.cause, event.start, event.end))
        self.intervals.append(
            (
                *self._ids,
                event.step,
                event.engine,
                event.state,
                event.cause,
                event.start,
                event.end,
                event.weight_version,
            )
        )

    def _take_sample(self, event: EngineSample, time: float) -> None:
        speed = finite(metrics.tokens_per_second(event.response_tokens, event.seconds))
        kv_cache = None if event.kv_cache is None else finite(event.kv_cache)
        self.samples.append(
            (*self._ids, time, event.step, event.engine, event.running, speed, event.drafted, event.accepted, kv_cache)
        )

    def _take_train_step(self, event: TrainStep, time: float) -> None:
        parts = event.seconds_by_part
        row = self._step(event.step)
        first = row["finished_at"] is None
        row.update(
            epoch=event.epoch,
            finished_at=time,
            experience_seconds=finite(parts.get("experience")),
            train_seconds=finite(parts.get("train")),
            sync_seconds=finite(parts.get("sync")),
            reward=finite(event.metrics.get(REWARD_METRIC)),
        )
        for name, value in event.metrics.items():
            new = first and not name.startswith(EVALUATION_PREFIX)
            (self.new_metrics if new else self.metrics)[name, event.step] = finite(value)

    def _take_evaluation(self, event: Evaluation, time: float) -> None:
        for name, value in event.metrics.items():
            self.metrics[EVALUATION_PREFIX + name, event.step] = finite(value)

    def _take_move(self, event: SampleMoved, time: float) -> None:
        self._step(event.step)["moves"] += 1
        self.moves.append(
            (
                *self._ids,
                time,
                event.step,
                event.sample,
                event.source_engine,
                event.destination_engine,
                event.cause,
                event.carrier,
                event.outcome,
                finite(event.seconds),
                event.tokens,
                finite(event.downtime_seconds),
                finite(event.predicted_seconds),
            )  # fmt: skip
        )

    def _take_switch(self, event: LayoutSwitched, time: float) -> None:
        self._step(event.step)["switches"] += 1
        self.switches.append(
            (*self._ids, time, event.step, event.node, event.from_tp, event.to_tp, event.samples, finite(event.seconds))
        )

    def _take_stability(self, event: RankStability, time: float) -> None:
        self.stability[event.epoch] = (finite(event.correlation), event.prompts)

    def _take_run_started(self, event: RunStarted, time: float) -> None:
        self.started = (event, time)

    def _take_run_finished(self, event: RunFinished, time: float) -> None:
        self.finished = (event, time)


def new_step(run_id: int, attempt_id: int, step: int) -> StepRow:
    """Return the row of a step without any data."""
    floats = {*BUBBLE_COLUMNS, *SECONDS}
    row: StepRow = {"run_id": run_id, "step": step, "attempt_id": attempt_id}
    row.update(dict.fromkeys(_STEP_FACTS))
    row.update({name: 0.0 if name in floats else 0 for name in _STEP_SUMS})
    return row


def planned_steps(event: RunStarted) -> int | None:
    """Return the number of training steps of the run as `summary.steps_planned` does, None if unknown."""
    planned = None if event.steps_per_epoch is None else event.epochs * event.steps_per_epoch
    return planned if planned is None or abs(planned) <= INT32_MAX else None


def _cut(segments: Iterable[Segment], begin: float, end: float) -> list[Segment]:
    """Return the parts of the segments between two moments."""
    return [
        Segment(one.state, one.cause, start, stop)
        for one in segments
        if (start := max(one.start, begin)) < (stop := min(one.end, end))
    ]


_TAKE: dict[type[Event] | type[None], Callable[[Rollup, Any, float], None]] = {
    RolloutStarted: Rollup._take_rollout_started,
    RolloutFinished: Rollup._take_rollout_finished,
    EngineStep: Rollup._take_engine_step,
    EngineInterval: Rollup._take_interval,
    EngineSample: Rollup._take_sample,
    TrainStep: Rollup._take_train_step,
    Evaluation: Rollup._take_evaluation,
    SampleMoved: Rollup._take_move,
    LayoutSwitched: Rollup._take_switch,
    RankStability: Rollup._take_stability,
    RunStarted: Rollup._take_run_started,
    RunFinished: Rollup._take_run_finished,
}
