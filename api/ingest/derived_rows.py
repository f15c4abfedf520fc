"""Writing derived rows into their tables, and removing them when a newer attempt repeats their steps.

The run's row must be locked (`run_status.lock_run`), because steps are read, changed and written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Table, delete, func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest.rollup import (
    ENGINE_STEP_COUNTERS,
    INTERVAL_COLUMNS,
    MOVE_COLUMNS,
    SAMPLE_COLUMNS,
    STEP_COLUMNS,
    SWITCH_COLUMNS,
    Rollup,
    Segment,
    StepRow,
    planned_steps,
    segment,
    steps_concerned,
)
from rhyme_openrlhf.api.ingest.totals import EPOCH_SUMS, epoch_changes, finite, run_figures
from rhyme_openrlhf.api.ingest.validation import Arrived
from rhyme_openrlhf.api.store.bulk import BulkInsert, add, replace
from rhyme_openrlhf.api.store.curve_blocks import settle, unpack
from rhyme_openrlhf.api.store.json_values import storable
from rhyme_openrlhf.api.store.models import Artifact, Attempt, Run
from rhyme_openrlhf.api.store.record import (
    EngineSampleRow,
    EngineStepRow,
    EpochRow,
    Interval,
    Metric,
    Move,
    RankStabilityRow,
    RawEvent,
    Step,
    Switch,
    SystemRow,
    of_kinds,
)
from rhyme_openrlhf.telemetry.events import RunStarted, SystemSample

CHECKPOINT = "checkpoint"


def _table(model: Any) -> Table:
    table: Table = model.__table__
    return table


STEPS, EPOCHS, INTERVALS = _table(Step), _table(EpochRow), _table(Interval)
# Tables whose rows belong to a step of a run.
OF_STEPS = tuple(map(_table, (Step, EngineStepRow, Interval, EngineSampleRow, Metric, Move, Switch)))

_STEP_KEYS = ("run_id", "step")
_METRIC_COLUMNS = ("run_id", "name", "step", "attempt_id", "value")
_STABILITY_COLUMNS = ("run_id", "epoch", "attempt_id", "correlation", "prompts")
_ARTIFACT_COLUMNS = ("run_id", "attempt_id", "kind", "step", "path", "created_at")
_SYSTEM_COLUMNS = (
    "run_id", "attempt_id", "time", "node", "cpu", "load", "memory_used", "memory_total", "disk_free", "shared_memory",
    "object_store", "gpus", "processes",
)  # fmt: skip
_write_steps = BulkInsert(STEPS, STEP_COLUMNS, replace(_STEP_KEYS, STEP_COLUMNS))
_write_engine_steps = BulkInsert(
    _table(EngineStepRow),
    ("run_id", "step", "engine", "attempt_id", "weight_version", *ENGINE_STEP_COUNTERS),
    add("engine_steps", ("run_id", "step", "engine"), ENGINE_STEP_COUNTERS, replaced=("weight_version",)),
)
_write_intervals = BulkInsert(INTERVALS, INTERVAL_COLUMNS)
_write_samples = BulkInsert(_table(EngineSampleRow), SAMPLE_COLUMNS)
_write_moves = BulkInsert(_table(Move), MOVE_COLUMNS)
_write_switches = BulkInsert(_table(Switch), SWITCH_COLUMNS)
# A resumed attempt may evaluate the step it resumed from again: the newer attempt's value stays.
_write_metrics = BulkInsert(
    _table(Metric),
    _METRIC_COLUMNS,
    replace(("run_id", "name", "step"), _METRIC_COLUMNS, "metrics.attempt_id <= excluded.attempt_id"),
)
_write_stability = BulkInsert(
    _table(RankStabilityRow),
    _STABILITY_COLUMNS,
    replace(("run_id", "epoch"), _STABILITY_COLUMNS, "rank_stability.attempt_id <= excluded.attempt_id"),
)
_write_artifacts = BulkInsert(_table(Artifact), _ARTIFACT_COLUMNS, "ON CONFLICT DO NOTHING")
_write_system = BulkInsert(_table(SystemRow), _SYSTEM_COLUMNS)
_write_epochs = BulkInsert(EPOCHS, ("run_id", "epoch", *EPOCH_SUMS), add("epochs", ("run_id", "epoch"), EPOCH_SUMS))


def derive(session: Session, run: Run, attempt_id: int, ceiling: int | None, fresh: Sequence[Arrived]) -> Rollup:
    """Write the derived rows of an attempt's new events; `ceiling` as in `Rollup`."""
    connection, run_id = session.connection(), run.id
    stored = _stored_steps(connection, run_id, attempt_id, steps_concerned(fresh))
    rollup = Rollup(run_id, attempt_id, ceiling, stored)
    rollup.add(fresh)
    rollup.settle_bubbles(_segments(connection, run_id, rollup.needs_intervals()))
    ids = (run_id, attempt_id)
    of_engines = [
        (run_id, step, engine, attempt_id, *row) for (step, engine), row in sorted(rollup.engine_steps.items())
    ]
    _write_engine_steps.new(connection, [row for row in of_engines if rollup.is_new(row[1])])
    _write_engine_steps(connection, [row for row in of_engines if not rollup.is_new(row[1])])
    _count_engines(connection, run_id, rollup)
    changed = rollup.changed_steps()
    of_steps = [tuple(row[name] for name in STEP_COLUMNS) for row in changed]
    _write_steps.new(connection, [row for row in of_steps if rollup.is_new(row[1])])
    _write_steps(connection, [row for row in of_steps if not rollup.is_new(row[1])])
    _write_intervals(connection, rollup.intervals)
    _write_samples(connection, rollup.samples)
    _write_moves(connection, rollup.moves)
    _write_switches(connection, rollup.switches)
    samples = [(*ids, one.time, *_system_row(event)) for one in fresh if isinstance(event := one.event, SystemSample)]
    _write_system(connection, samples)
    for write, metrics in ((_write_metrics.new, rollup.new_metrics), (_write_metrics, rollup.metrics)):
        # Sorted by name, so that a curve's values are adjacent if the database keeps rows in order of arrival.
        write(connection, [(run_id, *key, attempt_id, value) for key, value in sorted(metrics.items(), key=_name)])
    _write_stability(connection, [(run_id, epoch, attempt_id, *row) for epoch, row in rollup.stability.items()])
    _write_artifacts(
        connection, [(*ids, CHECKPOINT, step, path, time) for (step, path), time in rollup.checkpoints.items()]
    )
    _change_epochs(connection, run_id, [stored[row["step"]] for row in changed if row["step"] in stored], changed)
    settle(connection, run, {*rollup.steps, *(step for _, step in rollup.metrics)})
    return rollup


def remove(session: Session, run: Run, attempt_ids: Collection[int], from_step: int | None) -> None:
    """Delete the rows of these attempts from a step on; with None, all rows, including those without a step."""
    connection, run_id = session.connection(), run.id
    unpack(connection, run, from_step or 0)
    mine = [STEPS.c.run_id == run_id, STEPS.c.attempt_id.in_(attempt_ids)]
    if from_step is not None:
        mine.append(STEPS.c.step >= from_step)
    gone = [dict(row) for row in connection.execute(select(STEPS).where(*mine)).mappings()]
    _change_epochs(connection, run_id, gone, [])
    for table in OF_STEPS:
        query = delete(table).where(table.c.run_id == run_id, table.c.attempt_id.in_(attempt_ids))
        connection.execute(query if from_step is None else query.where(table.c.step >= from_step))
    if from_step is None:
        for model in (RankStabilityRow, Artifact, SystemRow):
            connection.execute(delete(model).where(model.run_id == run_id, model.attempt_id.in_(attempt_ids)))


def update_header(session: Session, run: Run, attempt: Attempt, rollup: Rollup) -> None:
    """Update the run's roll-up columns."""
    if rollup.started is not None and not _newer_started(session, attempt):
        event = rollup.started[0]
        run.engines, run.tensor_parallel_size, run.epochs = event.engines, event.tensor_parallel_size, event.epochs
        run.steps_total = planned_steps(event)
    elif not rollup.steps:
        return
    epochs = session.connection().execute(select(EPOCHS).where(EPOCHS.c.run_id == run.id)).mappings()
    for name, value in run_figures([dict(row) for row in epochs], run.engines).items():
        setattr(run, name, value)
    trained = select(Step.step).where(Step.run_id == run.id, Step.finished_at.is_not(None))
    run.step = session.execute(trained.order_by(Step.step.desc()).limit(1)).scalar_one_or_none() or 0


def _newer_started(session: Session, attempt: Attempt) -> bool:
    """Return True if a newer attempt has reported the run's configuration."""
    newer = select(RawEvent.id).where(
        RawEvent.run_id == attempt.run_id, *of_kinds([RunStarted.kind]), RawEvent.attempt_id > attempt.id
    )
    return session.execute(newer.limit(1)).first() is not None


def _stored_steps(connection: Connection, run_id: int, attempt_id: int, steps: Collection[int]) -> dict[int, StepRow]:
    if not steps:
        return {}
    query = select(STEPS).where(STEPS.c.run_id == run_id, _among(STEPS.c.step, steps), STEPS.c.attempt_id == attempt_id)
    return {row["step"]: dict(row) for row in connection.execute(query).mappings()}


def _segments(connection: Connection, run_id: int, steps: Collection[int]) -> dict[int, list[Segment]]:
    """Return the stored intervals of these steps."""
    found: dict[int, list[Segment]] = {step: [] for step in steps}
    if steps:
        of = INTERVALS.c
        query = select(of.step, of.state, of.cause, of.start, of.end).where(of.run_id == run_id, of.step.in_(steps))
        for step, state, cause, start, end in connection.execute(query):
            found[step].append(segment(state, cause, start, end))
    return found


def _count_engines(connection: Connection, run_id: int, rollup: Rollup) -> None:
    """Set `engines` of the steps: the number of engines that have reported."""
    told = Counter(step for step, _ in rollup.engine_steps)
    stored = [step for step in told if not rollup.is_new(step)]
    if stored:
        of = _table(EngineStepRow).c
        query = select(of.step, func.count()).where(of.run_id == run_id, of.step.in_(stored)).group_by(of.step)
        told.update({step: count - told[step] for step, count in connection.execute(query)})
    for step, engines in told.items():
        rollup.steps[step]["engines"] = engines


def _among(column: Column[int], steps: Collection[int]) -> ColumnElement[bool]:
    """Return the condition for these steps, as one range if they are dense, because a range is found faster."""
    first, last = min(steps), max(steps)
    return column.between(first, last) if last - first <= 2 * len(steps) else column.in_(steps)


def _name(item: tuple[tuple[str, int], Any]) -> str:
    return item[0][0]


def _change_epochs(connection: Connection, run_id: int, before: Sequence[StepRow], after: Sequence[StepRow]) -> None:
    changes = epoch_changes(before, after)
    rows = [
        (run_id, epoch, *(sums[name] for name in EPOCH_SUMS)) for epoch, sums in changes.items() if any(sums.values())
    ]
    _write_epochs(connection, rows)
    if any(sums["steps_begun"] < 0 for sums in changes.values()):
        connection.execute(delete(EPOCHS).where(EPOCHS.c.run_id == run_id, EPOCHS.c.steps_begun == 0))


def _system_row(event: SystemSample) -> tuple[Any, ...]:
    gpus = [
        [finite(busy), used, total]
        for busy, used, total in zip(event.gpu, event.gpu_memory_used, event.gpu_memory_total, strict=False)
    ]
    processes = {
        name: [finite(cores), event.process_memory.get(name, 0)]
        for name, cores in event.process_cpu.items()
        if storable(name)
    }
    return (
        event.node, finite(event.cpu), finite(event.load), event.memory_used, event.memory_total, event.disk_free,
        event.shared_memory, event.object_store, json.dumps(gpus), json.dumps(processes),
    )  # fmt: skip
