"""The makers of webhooks, when a resumed run began to wait for its start, and marks of imports under way."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0020, and compute the pauses of runs that wait."""
    op.add_column("webhooks", sa.Column("maker_id", sa.Integer(), nullable=True))
    op.add_column("attempts", sa.Column("replacing_at", sa.Float(), nullable=True))
    op.add_column("runs", sa.Column("paused_at", sa.Float(), nullable=True))
    op.execute(
        """
        UPDATE runs SET paused_at = (
            SELECT MAX(one.finished_at) FROM attempts AS one
            WHERE one.run_id = runs.id AND one.started_at IS NOT NULL
        )
        WHERE EXISTS (
            SELECT 1 FROM attempts AS newest
            WHERE newest.run_id = runs.id AND newest.started_at IS NULL AND newest.finished_at IS NULL
              AND newest.number = (SELECT MAX(other.number) FROM attempts AS other WHERE other.run_id = runs.id)
        )
        """
    )
