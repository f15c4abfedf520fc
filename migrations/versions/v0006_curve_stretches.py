"""Blocks of curves joined to stretches; `Database.upgrade` makes those of the runs that are there already."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0006."""
    op.add_column("runs", sa.Column("packed_stretches", sa.Integer(), server_default="0", nullable=False))
    op.create_table(
        "curve_stretches",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("stretch", sa.Integer(), nullable=False),
        sa.Column("offsets", sa.LargeBinary(), nullable=False),
        sa.Column("values", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "name", "stretch", name="pk_curve_stretches"),
        sqlite_with_rowid=False,
        postgresql_with={"toast_tuple_target": 8160},
    )
