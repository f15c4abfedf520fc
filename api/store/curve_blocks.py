"""Blocks: a run's curves as arrays of values, copied from the rows of `steps` and `metrics`.

A curve of 30,000 steps is read from 40 blocks instead of 30,000 rows with many other columns. Values are neither
rounded nor left out, so down-sampling sees the same points.

Invariants:

- Blocks hold exactly the values of the rows of all steps below a run's `packed_steps`, for any order of writing. Later
  steps are read from their rows.
- `settle` maintains this in the transaction that changes the rows, with the run's row locked.
- `packed_steps` depends only on the run's newest step.

`api/read/curve_points.py` reads blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, Table, bindparam, delete, func, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.bulk import BulkInsert, replace
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import CurveBlock, Metric, Step
from rhyme_openrlhf.api.store.step_figures import STEP_CURVES

# Steps per block: with ten bytes each and the longest name, they fit into the 8,160 bytes of a page of PostgreSQL. Its
# tables keep rows in order of arrival, so each block of a curve is on another page.
BLOCK_STEPS = 768
# Steps by which `packed_steps` grows. Larger: more rows are read; smaller: the last block is written more often.
PACKED_AT_ONCE = 64
# Events of a step arrive within this many later steps, so its block is written once instead of once per event.
SETTLED_STEPS = 64
# Rows of `steps` packed at once: about 100,000 values with the metrics, so tens of MB.
PIECE_STEPS = 4096
OFFSET = np.dtype("<u2")
VALUE = np.dtype("<f8")

_BLOCKS: Table = CurveBlock.__table__  # type: ignore[assignment]
_COLUMNS = ("run_id", "name", "block", "offsets", "values")
_write = BulkInsert(_BLOCKS, _COLUMNS, replace(("run_id", "name", "block"), _COLUMNS))

# Built once, because combining 44 columns takes longer than reading their rows.
_OF_STEPS = (
    select(Step.step, *STEP_CURVES.values())
    .where(Step.run_id == bindparam("run"), Step.step.between(bindparam("low"), bindparam("high")))
    .order_by(Step.step)
)
_OF_METRICS = (
    select(Metric.name, Metric.step, Metric.value)
    .where(
        Metric.run_id == bindparam("run"),
        Metric.name.in_(bindparam("names", expanding=True)),
        Metric.step.between(bindparam("low"), bindparam("high")),
    )
    .order_by(Metric.name, Metric.step)
)


@dataclass(frozen=True)
class Points:
    """Points of a curve: `values[i]` at step `steps[i]`, ascending; NaN without a value."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[float | None]) -> Self:
        """Build points from a database's columns."""
        return cls(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))  # None becomes NaN

    def __add__(self, later: Points) -> Points:
        """Append later points."""
        return Points(np.concatenate((self.steps, later.steps)), np.concatenate((self.values, later.values)))

    def between(self, first: int, last: int) -> Points:
        """Return the points of the steps `first` to `last`."""
        begin, end = np.searchsorted(self.steps, (first, last + 1))
        return Points(self.steps[begin:end], self.values[begin:end])


NO_POINTS = Points.of((), ())


def metric_names(connection: Connection, run_id: int) -> list[str]:
    """Return the names of a run's metrics in order, with one index lookup per name instead of reading every row."""
    first = select(func.min(Metric.name).label("name")).where(Metric.run_id == run_id).cte("names", recursive=True)
    following = select(func.min(Metric.name)).where(Metric.run_id == run_id, Metric.name > first.c.name)
    found = first.union_all(select(following.scalar_subquery()).where(first.c.name.is_not(None)))
    return list(connection.execute(select(found.c.name).where(found.c.name.is_not(None))).scalars())


def settle(connection: Connection, run: Run, changed: Collection[int]) -> None:
    """Update the blocks after rows of the steps `changed` were written (`run` is locked)."""
    newest = connection.execute(select(func.max(Step.step)).where(Step.run_id == run.id)).scalar_one()
    end = 0 if newest is None else max(0, newest - SETTLED_STEPS) // PACKED_AT_ONCE * PACKED_AT_ONCE
    if end < run.packed_steps:
        unpack(connection, run, end)
    for block in sorted({step // BLOCK_STEPS for step in changed if step < run.packed_steps}):
        _pack(connection, run.id, block * BLOCK_STEPS, min((block + 1) * BLOCK_STEPS, run.packed_steps))
    if end > run.packed_steps:
        for first, following in _pieces(connection, run.id, run.packed_steps, end):
            _pack(connection, run.id, first, following)
        run.packed_steps = end


def unpack(connection: Connection, run: Run, from_step: int) -> None:
    """Drop the blocks of this step and of later ones, because their rows are deleted; `settle` creates them again."""
    first = from_step // BLOCK_STEPS
    run.packed_steps = min(run.packed_steps, first * BLOCK_STEPS)
    connection.execute(delete(_BLOCKS).where(_BLOCKS.c.run_id == run.id, _BLOCKS.c.block >= first))


def settle_all(session: Session) -> None:
    """Call `settle` for runs of an earlier version, and for runs whose blocks a migration has deleted."""
    newest = select(func.max(Step.step)).where(Step.run_id == Run.id).scalar_subquery()
    for run in session.scalars(select(Run).where(newest >= SETTLED_STEPS + Run.packed_steps + PACKED_AT_ONCE)):
        settle(session.connection(), run, ())


def _columns(connection: Connection, query: Select[*tuple[Any, ...]], **values: Any) -> list[Sequence[Any]]:
    """Return the query's columns as plain values of the driver, because row objects take six times as long."""
    result = connection.execute(query, values)
    rows = result.cursor.fetchall() if result.cursor is not None else []
    return list(zip(*rows, strict=True)) if rows else [()] * len(query.selected_columns)


def _metrics(connection: Connection, **values: Any) -> Iterator[tuple[str, Points]]:
    """Yield metrics from their rows, by name."""
    of, steps, numbers = _columns(connection, _OF_METRICS, **values)
    for name, begin, end in _runs(of):
        yield name, Points.of(steps[begin:end], numbers[begin:end])


def _runs(names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the begin and end of each name; equal names are adjacent."""
    begin = 0
    for name, same in itertools.groupby(names):
        end = begin + sum(1 for _ in same)
        yield name, begin, end
        begin = end


def _pieces(connection: Connection, run_id: int, first: int, following: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of the steps from `first` to before `following`, each with about PIECE_STEPS rows of `steps`.

    All ranges begin with a block, so the block that holds `first` is written anew.
    """
    first = first // BLOCK_STEPS * BLOCK_STEPS
    window = Step.step.between(first, following - 1)
    steps = connection.execute(select(Step.step).where(Step.run_id == run_id, window).order_by(Step.step)).scalars()
    # Steps may have gaps, because an attempt may have skipped some.
    bounds = [step // BLOCK_STEPS * BLOCK_STEPS for step in itertools.islice(steps, PIECE_STEPS, None, PIECE_STEPS)]
    yield from itertools.pairwise(sorted({first, *bounds, following}))


def _pack(connection: Connection, run_id: int, first: int, following: int) -> None:
    """Write the blocks of the steps from `first` to before `following`, from the rows; `first` begins a block."""
    window = {"run": run_id, "low": first, "high": following - 1}
    steps, *columns = _columns(connection, _OF_STEPS, **window)
    # A curve of a step takes precedence over a metric of the same name.
    names = [name for name in metric_names(connection, run_id) if name not in STEP_CURVES]
    curves = [(name, Points.of(steps, values)) for name, values in zip(STEP_CURVES, columns, strict=True)]
    curves += _metrics(connection, names=names, **window)
    _write(connection, [(run_id, name, *block) for name, points in curves for block in _blocks(points)])


def _blocks(points: Points) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield number, offsets and values of each block of a curve."""
    blocks = points.steps // BLOCK_STEPS
    offsets = (points.steps - blocks * BLOCK_STEPS).astype(OFFSET)
    values = points.values.astype(VALUE, copy=False)
    bounds = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            yield int(blocks[begin]), offsets[begin:end].tobytes(), values[begin:end].tobytes()
