"""A run's curves out of blocks and rows, in one statement: one way to the server and back, and one snapshot.

Invariants: as `api/curve_blocks.py` says, what lies below a run's `packed_blocks` is read from blocks and the rest from
rows; because one statement sees both and the border between them, it sees no step twice and leaves none out, whatever
is written meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from sqlalchemy import (
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

from rhyme_openrlhf.api import curve_blocks
from rhyme_openrlhf.api.curve_blocks import NO_POINTS, OFFSET, VALUE, Points
from rhyme_openrlhf.api.database import AS_BINARY
from rhyme_openrlhf.api.models import Run
from rhyme_openrlhf.api.problems import not_found
from rhyme_openrlhf.api.record import CurveBlock, Metric, Step
from rhyme_openrlhf.api.step_figures import STEP_CURVES

# The parts of the answer, in their order: the run itself (so that one that is not there is told from one without
# steps), blocks, rows of `metrics`, rows of `steps`.
_RUN, _BLOCKS, _METRICS, _STEPS = range(4)
# Part, name, block or step, offsets, values; then the values of a row.
_KEYS = 5
# Statements kept: the pages ask for some thirty combinations of names.
_KEPT = 256
_NOTHING = null()


def read_points(session: Session, uid: str, names: Collection[str], first: int, last: int) -> dict[str, Points]:
    """The curves of these names, from step `first` to `last`; an unknown name has no points.

    Columns and figures of a step come before metrics of the same name. Raises ProblemError (404).
    """
    of_steps = tuple(dict.fromkeys(name for name in names if name in STEP_CURVES))
    of_metrics = [name for name in dict.fromkeys(names) if name not in STEP_CURVES]
    size = curve_blocks.BLOCK_STEPS
    values = {"uid": uid, "names": [*of_steps, *of_metrics], "low": first, "high": last, "size": size}
    values |= {"first_block": first // size, "last_block": last // size}
    if of_metrics:
        values["metrics"] = of_metrics
    # What the session has changed is part of the answer; a connection alone does not see to that.
    session.flush()
    statement = _statement(of_steps, bool(of_metrics))
    result = session.connection().execute(statement, values, execution_options=AS_BINARY)
    # As the driver gives them: rows of objects take six times as long.
    rows = result.cursor.fetchall() if result.cursor is not None else []
    parts: dict[int, list[Sequence[Any]]] = {part: list(of) for part, of in itertools.groupby(rows, lambda row: row[0])}
    if _RUN not in parts:
        raise not_found("run", uid)
    found = _of_blocks(parts.get(_BLOCKS, []), first, last)
    later = _of_metrics(parts.get(_METRICS, [])) | _of_steps(parts.get(_STEPS, []), of_steps)
    return {name: found.get(name, NO_POINTS) + later.get(name, NO_POINTS) for name in names}


def _of_blocks(rows: Sequence[Sequence[Any]], first: int, last: int) -> dict[str, Points]:
    found = {}
    for name, of in itertools.groupby(rows, lambda row: row[1]):
        _, _, blocks, offsets, values, *_ = zip(*of, strict=True)
        begins = np.repeat(
            np.array(blocks, dtype=np.int64) * curve_blocks.BLOCK_STEPS, [len(of_one) for of_one in offsets]
        )
        steps = begins + np.frombuffer(b"".join(offsets), OFFSET)
        found[name] = Points(steps, np.frombuffer(b"".join(values), VALUE)).between(first, last)
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
    """For these curves of steps; made once, because to put many columns together takes longer than to read them."""
    run = select(Run.id, Run.packed_blocks).where(Run.uid == bindparam("uid")).cte("run")
    run_id = select(run.c.id).scalar_subquery()
    packed = select(run.c.packed_blocks).scalar_subquery()
    width = max(len(of_steps), 1)

    def part(
        number: int, name: Any, at: Any, offsets: Any = _NOTHING, values: Any = _NOTHING, row: Sequence[Any] = ()
    ) -> Select[Any]:
        # Every part says its types: of a NULL alone PostgreSQL makes text.
        cells: list[ColumnElement[Any]] = [cast(one, Float) for one in (*row, *[_NOTHING] * (width - len(row)))]
        keys = (literal(number), cast(name, String), cast(at, Integer))
        blobs = (cast(offsets, LargeBinary), cast(values, LargeBinary))
        columns: list[ColumnElement[Any]] = [*keys, *blobs, *cells]
        return select(*(one.label(f"c{i}") for i, one in enumerate(columns)))

    def behind(table: Any) -> tuple[ColumnElement[bool], ...]:
        return (
            table.run_id == run_id,
            table.step.between(bindparam("low"), bindparam("high")),
            table.step >= packed * bindparam("size"),
        )

    blocks = part(_BLOCKS, CurveBlock.name, CurveBlock.block, CurveBlock.offsets, CurveBlock.values).where(
        CurveBlock.run_id == run_id,
        CurveBlock.name.in_(bindparam("names", expanding=True)),
        CurveBlock.block.between(bindparam("first_block"), bindparam("last_block")),
    )
    parts = [part(_RUN, _NOTHING, run.c.packed_blocks), blocks]
    if of_steps:
        figures = [STEP_CURVES[name] for name in of_steps]
        parts.append(part(_STEPS, _NOTHING, Step.step, row=figures).where(*behind(Step)))
    if with_metrics:
        wanted = Metric.name.in_(bindparam("metrics", expanding=True))
        parts.append(part(_METRICS, Metric.name, Metric.step, row=[Metric.value]).where(wanted, *behind(Metric)))
    both = union_all(*parts)
    columns = list(both.selected_columns)
    return both.order_by(columns[0], columns[1], columns[2])
