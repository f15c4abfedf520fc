"""Faster writing of reports: drop foreign keys of the large tables, and indexes that no page uses."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Table: reference that goes, and what SQLite makes of the table (it makes it anew). Without a row number of its own, a
# table is kept in the order of its key: one tree instead of two, and a curve lies in one piece.
_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "engine_intervals": ("run_id", {}),
    "engine_samples": ("run_id", {}),
    "engine_steps": ("run_id", {"sqlite_with_rowid": False}),
    "events": ("attempt_id", {"sqlite_autoincrement": True}),
    "metrics": ("run_id", {"sqlite_with_rowid": False}),
    "moves": ("run_id", {}),
    "steps": ("run_id", {"sqlite_with_rowid": False}),
    "switches": ("run_id", {}),
}
_RARE = (
    "kind NOT IN ('engine_interval', 'engine_sample', 'engine_step', 'rollout_progress', 'sample_moved', "
    "'stage_started', 'weights_loaded')"
)


def upgrade() -> None:
    """Upgrade the schema to version 0002."""
    op.drop_index("ix_engine_intervals_run_start", "engine_intervals")
    op.drop_index("ix_events_run_kind_id", "events")
    connection = op.get_bind()
    sqlite = connection.dialect.name == "sqlite"
    highest = _highest_event(connection) if sqlite else None
    for table, (column, options) in _TABLES.items():
        with op.batch_alter_table(table, table_kwargs=options) as batch:
            batch.drop_constraint(f"fk_{table}_{column}", type_="foreignkey")
    if highest is not None:
        _keep_highest_event(connection, highest)
    op.create_index(
        "ix_events_rare",
        "events",
        ["run_id", "kind", "id"],
        sqlite_where=sa.text(_RARE),
        postgresql_where=sa.text(_RARE),
    )
    op.create_index("ix_tokens_run_id", "tokens", ["run_id"])


# The number of an event is never used again, also not of one that was deleted: the table's copy does not know it.


def _highest_event(connection: sa.Connection) -> int | None:
    highest: int | None = connection.execute(
        sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'events'")
    ).scalar_one_or_none()
    return highest


def _keep_highest_event(connection: sa.Connection, highest: int) -> None:
    connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = 'events'"))
    connection.execute(sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES ('events', :seq)"), {"seq": highest})
