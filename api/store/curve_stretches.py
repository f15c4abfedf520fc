"""Stretches: several blocks of a curve joined, so that a long run's curve is read from few pages of the store.

A PostgreSQL table keeps rows in order of arrival, so blocks of all curves and runs are mixed. Each of the 400 blocks of
a curve of 26,000 steps is on another page, and under heavy writing most of these pages must be fetched. A stretch holds
the content of STRETCH_BLOCKS blocks on one page.

Invariant: below a run's `packed_stretches`, every curve with blocks has a stretch that equals its blocks; the blocks
stay. `curve_blocks.py` maintains this, and defines blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Table, delete, select

from rhyme_openrlhf.api.store.bulk import BulkInsert, replace
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import CurveBlock, CurveStretch

# 768 steps with ten bytes each and the longest name fit into the 8,160 bytes of a page of PostgreSQL.
STRETCH_BLOCKS = 12
VALUE = np.dtype("<f8")
BLOCK_OFFSET = np.dtype("u1")
STRETCH_OFFSET = np.dtype("<u2")

_STRETCHES: Table = CurveStretch.__table__  # type: ignore[assignment]
_COLUMNS = ("run_id", "name", "stretch", "offsets", "values")
_write = BulkInsert(_STRETCHES, _COLUMNS, replace(("run_id", "name", "stretch"), _COLUMNS))


def join(connection: Connection, run: Run, names: Collection[str], changed: Iterable[int], block_steps: int) -> None:
    """Update the stretches of the curves `names` after the blocks `changed` were written."""
    end = run.packed_blocks // STRETCH_BLOCKS
    stale = {block // STRETCH_BLOCKS for block in changed if block // STRETCH_BLOCKS < run.packed_stretches}
    for stretch in [*sorted(stale), *range(run.packed_stretches, end)]:
        _join(connection, run.id, names, stretch, block_steps)
    run.packed_stretches = max(end, run.packed_stretches)


def forget(connection: Connection, run: Run) -> None:
    """Drop the stretches whose blocks were deleted: those from the run's `packed_blocks` on."""
    run.packed_stretches = min(run.packed_stretches, run.packed_blocks // STRETCH_BLOCKS)
    gone = _STRETCHES.c.stretch >= run.packed_stretches
    connection.execute(delete(_STRETCHES).where(_STRETCHES.c.run_id == run.id, gone))


def _join(connection: Connection, run_id: int, names: Collection[str], stretch: int, block_steps: int) -> None:
    first = stretch * STRETCH_BLOCKS
    query = select(CurveBlock.name, CurveBlock.block, CurveBlock.offsets, CurveBlock.values).where(
        CurveBlock.run_id == run_id,
        # Restrict by name as well, because the key has the name before the block.
        CurveBlock.name.in_(names),
        CurveBlock.block.between(first, first + STRETCH_BLOCKS - 1),
    )
    found = connection.execute(query.order_by(CurveBlock.name, CurveBlock.block)).all()
    rows = [
        (run_id, name, stretch, *_joined(list(of), first, block_steps))
        for name, of in itertools.groupby(found, lambda row: row[0])
    ]
    _write(connection, rows)


def _joined(blocks: Sequence[Sequence[Any]], first: int, block_steps: int) -> tuple[bytes, bytes]:
    """Return offsets and values of one stretch."""
    offsets = [
        np.frombuffer(offsets, BLOCK_OFFSET).astype(STRETCH_OFFSET) + (block - first) * block_steps
        for _, block, offsets, _ in blocks
    ]
    return np.concatenate(offsets).astype(STRETCH_OFFSET).tobytes(), b"".join(values for *_, values in blocks)
