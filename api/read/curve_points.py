"""Reading a run's curves from blocks and rows in one statement: one round trip and one snapshot.

Invariant: steps below a run's `packed_steps` are read from blocks (`store/curve_blocks.py`), later steps from rows. One
statement sees both and the border between them. It therefore reads every step exactly once, also during concurrent
writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    CompoundSelect,
    Float,
    Integer,
    LargeBinary,
    Select,
    String,
    bindparam,
    cast,
    literal,
    null,
    select,
    union_all,
)
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store import curve_blocks
from rhyme_openrlhf.api.store.curve_blocks import NO_POINTS, OFFSET, VALUE, Points
from rhyme_openrlhf.api.store.database import AS_BINARY
from rhyme_openrlhf.api.store.lookup import NotFoundError
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import CurveBlock, Metric, Step
from rhyme_openrlhf.api.store.step_figures import STEP_CURVES

# Parts of the result in order: the run itself (to tell a missing run from one without steps), blocks, rows of
# `metrics`, rows of `steps`.
_RUN, _BLOCKS, _METRICS, _STEPS = range(4)
# Columns of a row: part, name, number (of block or step), offsets, values; then the values of a row.
_KEYS = 5
# Cached statements: the pages use about thirty combinations of names.
_KEPT = 256
_NOTHING = null()


def read_points(session: Session, uid: str, names: Collection[str], first: int, last: int) -> dict[str, Points]:
    """Return the curves of these names from step `first` to `last`; an unknown name has no points.

    Columns and figures of a step take precedence over metrics of the same name. Raises NotFoundError.
    """
    of_steps = tuple(dict.fromkeys(name for name in names if name in STEP_CURVES))
    of_metrics = [name for name in dict.fromkeys(names) if name not in STEP_CURVES]
    size = curve_blocks.BLOCK_STEPS
    values = {"uid": uid, "names": [*of_steps, *of_metrics], "low": first, "high": last}
    values |= {"first_block": first // size, "last_block": last // size}
    if of_metrics:
        values["metrics"] = of_metrics
    # The result includes unflushed changes of the session, which a plain connection would not see.
    session.flush()
    statement = _statement(of_steps, bool(of_metrics))
    result = session.connection().execute(statement, values, execution_options=AS_BINARY)
    # Plain rows of the driver; SQLAlchemy's row objects take six times as long.
    rows = result.cursor.fetchall() if result.cursor is not None else []
    parts: dict[int, list[Sequence[Any]]] = {part: list(of) for part, of in itertools.groupby(rows, lambda row: row[0])}
    if _RUN not in parts:
        raise NotFoundError("run", uid)
    blocks = _packed(parts.get(_BLOCKS, []), size)
    rest = _of_metrics(parts.get(_METRICS, [])) | _of_steps(parts.get(_STEPS, []), of_steps)
    return {name: blocks.get(name, NO_POINTS).between(first, last) + rest.get(name, NO_POINTS) for name in names}


def known_values(points: Points) -> dict[int, float]:
    """Return the values of a curve by step, without steps that have none."""
    known = ~np.isnan(points.values)
    return dict(zip(points.steps[known].tolist(), points.values[known].tolist(), strict=True))


def _packed(rows: Sequence[Sequence[Any]], size: int) -> dict[str, Points]:
    """Decode blocks of `size` steps."""
    found = {}
    for name, of in itertools.groupby(rows, lambda row: row[1]):
        _, _, numbers, offsets, values, *_ = zip(*of, strict=True)
        counts = [len(of_one) // OFFSET.itemsize for of_one in offsets]
        begins = np.repeat(np.array(numbers, dtype=np.int64) * size, counts)
        steps = begins + np.frombuffer(b"".join(offsets), OFFSET)
        found[name] = Points(steps, np.frombuffer(b"".join(values), VALUE))
    return found


def _of_metrics(rows: Sequence[Sequence[Any]]) -> dict[str, Points]:
    found = {}
    for name, of in itertools.groupby(rows, lambda row: row[1]):
        columns = list(zip(*of, strict=True))
        found[name] = Points.of(columns[2], columns[_KEYS])
    return found


def _of_steps(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> dict[str, Points]:
    if not rows:
        return {}
    columns = list(zip(*rows, strict=True))
    return {name: Points.of(columns[2], values) for name, values in zip(names, columns[_KEYS:], strict=False)}


@lru_cache(maxsize=_KEPT)
def _statement(of_steps: tuple[str, ...], with_metrics: bool) -> CompoundSelect[Any]:
    """Return the statement for these curves of steps; cached, because building it takes longer than reading."""
    run = select(Run.id, Run.packed_steps).where(Run.uid == bindparam("uid")).cte("run")
    run_id = select(run.c.id).scalar_subquery()
    packed = select(run.c.packed_steps).scalar_subquery()
    width = max(len(of_steps), 1)

    def part(
        number: int, name: Any, at: Any, offsets: Any = _NOTHING, values: Any = _NOTHING, row: Sequence[Any] = ()
    ) -> Select[Any]:
        # Every part declares its types, because PostgreSQL turns a bare NULL into text.
        cells: list[ColumnElement[Any]] = [cast(one, Float) for one in (*row, *[_NOTHING] * (width - len(row)))]
        keys = (literal(number), cast(name, String), cast(at, Integer))
        blobs = (cast(offsets, LargeBinary), cast(values, LargeBinary))
        columns: list[ColumnElement[Any]] = [*keys, *blobs, *cells]
        return select(*(one.label(f"c{i}") for i, one in enumerate(columns)))

    def behind(table: Any) -> tuple[ColumnElement[bool], ...]:
        return (
            table.run_id == run_id,
            table.step.between(bindparam("low"), bindparam("high")),
            table.step >= packed,
        )

    wanted: BindParameter[Any] = bindparam("names", expanding=True)
    blocks = part(_BLOCKS, CurveBlock.name, CurveBlock.block, CurveBlock.offsets, CurveBlock.values).where(
        CurveBlock.run_id == run_id,
        CurveBlock.name.in_(wanted),
        CurveBlock.block.between(bindparam("first_block"), bindparam("last_block")),
    )
    parts = [part(_RUN, _NOTHING, run.c.packed_steps), blocks]
    if of_steps:
        figures = [STEP_CURVES[name] for name in of_steps]
        parts.append(part(_STEPS, _NOTHING, Step.step, row=figures).where(*behind(Step)))
    if with_metrics:
        named = Metric.name.in_(bindparam("metrics", expanding=True))
        parts.append(part(_METRICS, Metric.name, Metric.step, row=[Metric.value]).where(named, *behind(Metric)))
    both = union_all(*parts)
    columns = list(both.selected_columns)
    return both.order_by(columns[0], columns[1], columns[2])
