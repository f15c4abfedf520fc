"""Settings of runs as rows; `Database.upgrade` creates those of existing runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0012."""
    op.create_table(
        "run_parameters",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("number", sa.Float(), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_run_parameters_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "name", name="pk_run_parameters"),
    )
    op.create_index("ix_run_parameters_name", "run_parameters", ["name"])
