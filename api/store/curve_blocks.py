"""A run's curves, value beside value: what `steps` and `metrics` hold row by row, copied into blocks of some steps.

A curve of 30,000 steps is read from 470 rows instead of 30,000, of which each holds much else. Nothing is rounded or
left out, so down-sampling sees the same points. Invariants: below a run's `packed_blocks`, blocks hold exactly what the
rows hold, for every curve, whatever was written in which order; from there on there are no blocks, and the rows are
read. `settle` keeps it so, in the transaction that changes the rows, with the run's row locked. Where `packed_blocks`
is follows from the run's newest step alone. `curve_stretches.py` joins blocks of long runs;
`api/read/curve_points.py` reads both.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Select, Table, bindparam, delete, func, or_, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store import curve_stretches
from rhyme_openrlhf.api.store.bulk import BulkInsert, replace
from rhyme_openrlhf.api.store.curve_stretches import BLOCK_OFFSET, VALUE
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import CurveBlock, Metric, Step
from rhyme_openrlhf.api.store.step_figures import STEP_CURVES

# Steps of a block: 512 bytes a curve. Longer blocks leave more rows to be read behind the last one.
BLOCK_STEPS = 64
# Events of a step come in this many steps after it began: then its block is written once, and not again for each.
SETTLED_STEPS = 64
# Rows of `steps` that are packed at once: some 100,000 values with the metrics, so tens of MB.
PIECE_STEPS = 4096

_BLOCKS: Table = CurveBlock.__table__  # type: ignore[assignment]
_COLUMNS = ("run_id", "name", "block", "offsets", "values")
_write = BulkInsert(_BLOCKS, _COLUMNS, replace(("run_id", "name", "block"), _COLUMNS))

# Made once: to put 44 columns together takes longer than to read their rows.
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
    """`values[i]` at step `steps[i]`, ascending; NaN where there is no value."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, steps: Sequence[int], values: Sequence[float | None]) -> Self:
        """From a database's columns."""
        return cls(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))  # None becomes NaN

    def __add__(self, later: Points) -> Points:
        """These and later ones."""
        return Points(np.concatenate((self.steps, later.steps)), np.concatenate((self.values, later.values)))

    def between(self, first: int, last: int) -> Points:
        """Those of the steps `first` to `last`."""
        begin, end = np.searchsorted(self.steps, (first, last + 1))
        return Points(self.steps[begin:end], self.values[begin:end])


NO_POINTS = Points.of((), ())


def metric_names(connection: Connection, run_id: int) -> list[str]:
    """Names of a run's metrics, in order: a look into the index for each, not at every row."""
    first = select(func.min(Metric.name).label("name")).where(Metric.run_id == run_id).cte("names", recursive=True)
    following = select(func.min(Metric.name)).where(Metric.run_id == run_id, Metric.name > first.c.name)
    found = first.union_all(select(following.scalar_subquery()).where(first.c.name.is_not(None)))
    return list(connection.execute(select(found.c.name).where(found.c.name.is_not(None))).scalars())


def settle(connection: Connection, run: Run, changed: Collection[int]) -> None:
    """Bring the blocks up to date after rows of the steps `changed` were written (`run` locked)."""
    newest = connection.execute(select(func.max(Step.step)).where(Step.run_id == run.id)).scalar_one()
    end = 0 if newest is None else max(0, newest - SETTLED_STEPS) // BLOCK_STEPS
    if end < run.packed_blocks:
        unpack(connection, run, end * BLOCK_STEPS)
    late = {block for step in changed if (block := step // BLOCK_STEPS) < run.packed_blocks}
    for block in sorted(late):
        _pack(connection, run.id, block, block + 1)
    if end > run.packed_blocks:
        for first, following in _pieces(connection, run.id, run.packed_blocks, end):
            _pack(connection, run.id, first, following)
        run.packed_blocks = end
    if late or run.packed_blocks // curve_stretches.STRETCH_BLOCKS > run.packed_stretches:
        names = {*STEP_CURVES, *metric_names(connection, run.id)}
        curve_stretches.join(connection, run, names, late, BLOCK_STEPS)


def unpack(connection: Connection, run: Run, from_step: int) -> None:
    """Forget the blocks with this step and later ones, because rows of theirs go; `settle` makes them again."""
    run.packed_blocks = min(run.packed_blocks, from_step // BLOCK_STEPS)
    connection.execute(delete(_BLOCKS).where(_BLOCKS.c.run_id == run.id, _BLOCKS.c.block >= run.packed_blocks))
    curve_stretches.forget(connection, run)


def settle_all(session: Session) -> None:
    """`settle` the runs that an earlier version wrote, or whose blocks a migration has thrown away."""
    newest = select(func.max(Step.step)).where(Step.run_id == Run.id).scalar_subquery()
    lacks_block = newest >= SETTLED_STEPS + (Run.packed_blocks + 1) * BLOCK_STEPS
    lacks_stretch = Run.packed_blocks >= (Run.packed_stretches + 1) * curve_stretches.STRETCH_BLOCKS
    for run in session.scalars(select(Run).where(or_(lacks_block, lacks_stretch))):
        settle(session.connection(), run, ())


def _columns(connection: Connection, query: Select[*tuple[Any, ...]], **values: Any) -> list[Sequence[Any]]:
    """The query's columns, as the driver gives them, because rows of objects take six times as long."""
    result = connection.execute(query, values)
    rows = result.cursor.fetchall() if result.cursor is not None else []
    return list(zip(*rows, strict=True)) if rows else [()] * len(query.selected_columns)


def _metrics(connection: Connection, **values: Any) -> Iterator[tuple[str, Points]]:
    """Metrics from their rows, by name."""
    of, steps, numbers = _columns(connection, _OF_METRICS, **values)
    for name, begin, end in _runs(of):
        yield name, Points.of(steps[begin:end], numbers[begin:end])


def _runs(names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Where each name begins and ends; equal ones follow each other."""
    begin = 0
    for name, same in itertools.groupby(names):
        end = begin + sum(1 for _ in same)
        yield name, begin, end
        begin = end


def _pieces(connection: Connection, run_id: int, first: int, following: int) -> Iterator[tuple[int, int]]:
    """The blocks from `first` to before `following`, in stretches with about PIECE_STEPS rows of `steps`."""
    window = Step.step.between(first * BLOCK_STEPS, following * BLOCK_STEPS - 1)
    steps = connection.execute(select(Step.step).where(Step.run_id == run_id, window).order_by(Step.step)).scalars()
    # Steps need not follow each other: an attempt may have skipped to any.
    bounds = [step // BLOCK_STEPS for step in itertools.islice(steps, PIECE_STEPS, None, PIECE_STEPS)]
    yield from itertools.pairwise(sorted({first, *bounds, following}))


def _pack(connection: Connection, run_id: int, first: int, following: int) -> None:
    """Write the blocks from `first` to before `following`, from the rows."""
    window = {"run": run_id, "low": first * BLOCK_STEPS, "high": following * BLOCK_STEPS - 1}
    steps, *columns = _columns(connection, _OF_STEPS, **window)
    # A curve of a step comes before a metric of its name.
    names = [name for name in metric_names(connection, run_id) if name not in STEP_CURVES]
    curves = [(name, Points.of(steps, values)) for name, values in zip(STEP_CURVES, columns, strict=True)]
    curves += _metrics(connection, names=names, **window)
    _write(connection, [(run_id, name, *block) for name, points in curves for block in _blocks(points)])


def _blocks(points: Points) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, offsets and values of each block of a curve."""
    blocks = points.steps // BLOCK_STEPS
    offsets = (points.steps - blocks * BLOCK_STEPS).astype(BLOCK_OFFSET)
    values = points.values.astype(VALUE, copy=False)
    bounds = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            yield int(blocks[begin]), offsets[begin:end].tobytes(), values[begin:end].tobytes()
