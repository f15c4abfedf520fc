"""Seconds in which a run was stopped between two attempts."""

from __future__ import annotations

import itertools
from operator import attrgetter

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0018, and compute the seconds of stored runs."""
    op.add_column("runs", sa.Column("paused_seconds", sa.Float(), server_default="0", nullable=False))
    connection = op.get_bind()
    names = ("run_id", "number", "started_at", "finished_at")
    attempts = sa.table("attempts", *map(sa.column, names))
    runs = sa.table("runs", sa.column("id"), sa.column("paused_seconds"))
    started = sa.select(attempts).where(attempts.c.started_at.is_not(None))
    rows = connection.execute(started.order_by(attempts.c.run_id, attempts.c.number)).all()
    for run_id, of_run in itertools.groupby(rows, attrgetter("run_id")):
        paused = sum(
            max(0.0, following.started_at - one.finished_at)
            for one, following in itertools.pairwise(of_run)
            if one.finished_at is not None
        )
        if paused:
            connection.execute(sa.update(runs).where(runs.c.id == run_id).values(paused_seconds=paused))
