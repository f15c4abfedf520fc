"""One level of larger curve blocks, without stretches; `Database.upgrade` creates the blocks of existing runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0010."""
    op.drop_table("curve_stretches")
    op.drop_table("curve_blocks")
    op.create_table(
        "curve_blocks",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("offsets", sa.LargeBinary(), nullable=False),
        sa.Column("values", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "name", "block", name="pk_curve_blocks"),
        sqlite_with_rowid=False,
        postgresql_with={"toast_tuple_target": 8160},
    )
    op.drop_column("runs", "packed_blocks")
    op.drop_column("runs", "packed_stretches")
    op.add_column("runs", sa.Column("packed_steps", sa.Integer(), server_default="0", nullable=False))
