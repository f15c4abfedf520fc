"""Accepted drafts of each step by source, and the downtime of each move.

Existing steps get their sums from the stored events, as the ingestion would compute them. The blocks of curves are
deleted, and `Database.upgrade` creates them again with the new curves.
"""

from __future__ import annotations

import json
from collections import defaultdict

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_SOURCES = ("accepted_siblings", "accepted_own")
# Rows that are read from the store at once.
_PIECE = 10_000


def upgrade() -> None:
    """Upgrade the schema to version 0005."""
    for table in ("steps", "epochs"):
        for name in _SOURCES:
            op.add_column(table, sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))
    for name in ("downtime_seconds", "predicted_seconds"):
        op.add_column("moves", sa.Column(name, sa.Float(), nullable=True))
    connection = op.get_bind()
    sums = _sums_of_steps(connection)
    if sums:
        change = sa.text(
            "UPDATE steps SET accepted_siblings = :siblings, accepted_own = :own "
            "WHERE run_id = :run AND attempt_id = :attempt AND step = :step"
        )
        keys = ("run", "attempt", "step", "siblings", "own")
        rows = [dict(zip(keys, (*key, *amounts), strict=True)) for key, amounts in sums.items()]
        for begin in range(0, len(rows), _PIECE):
            connection.execute(change, rows[begin : begin + _PIECE])
        for name in _SOURCES:
            of_epoch = (
                f"SELECT sum({name}) FROM steps WHERE run_id = epochs.run_id AND coalesce(epoch, 0) = epochs.epoch"
            )
            op.execute(f"UPDATE epochs SET {name} = coalesce(({of_epoch}), 0)")
    moved = "SELECT run_id, attempt_id, time, body FROM events WHERE kind = 'sample_moved' AND body LIKE '%downtime%'"
    change = sa.text(
        "UPDATE moves SET downtime_seconds = :downtime_seconds, predicted_seconds = :predicted_seconds "
        "WHERE run_id = :run AND attempt_id = :attempt AND step = :step AND time = :time AND sample = :sample"
    )
    for run, attempt, time, body in connection.execute(sa.text(moved)).all():
        event = json.loads(body)
        values = {name: event.get(name) for name in ("step", "sample", "downtime_seconds", "predicted_seconds")}
        connection.execute(change, {**values, "run": run, "attempt": attempt, "time": time})
    op.execute("DELETE FROM curve_blocks")
    op.execute("UPDATE runs SET packed_blocks = 0")


def _sums_of_steps(connection: sa.Connection) -> dict[tuple[int, int, int], list[int]]:
    """(run, attempt, step) -> what engines said of it."""
    found: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0, 0])
    query = "SELECT run_id, attempt_id, body FROM events WHERE kind = 'engine_step' AND body LIKE '%accepted_siblings%'"
    rows = connection.execute(sa.text(query), execution_options={"yield_per": _PIECE})
    for run, attempt, body in rows:
        event = json.loads(body)
        sums = found[run, attempt, event["step"]]
        for at, name in enumerate(_SOURCES):
            sums[at] += event["counters"].get(name, 0)
    return found
