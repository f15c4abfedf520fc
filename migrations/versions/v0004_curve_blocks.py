"""Curves side by side in blocks; `Database.upgrade` makes those of the runs that are there already."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0004."""
    op.add_column("runs", sa.Column("packed_blocks", sa.Integer(), server_default="0", nullable=False))
    op.create_table(
        "curve_blocks",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("offsets", sa.LargeBinary(), nullable=False),
        sa.Column("values", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "name", "block", name="pk_curve_blocks"),
        sqlite_with_rowid=False,
    )
