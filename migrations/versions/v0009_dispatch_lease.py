"""The dispatch lease of services, and the cluster on which each attempt was started."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0009."""
    op.add_column("attempts", sa.Column("cluster", sa.Text(), nullable=True))
    op.create_table(
        "dispatch_lease",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("beats", sa.BigInteger(), nullable=False),
        sa.Column("service", sa.String(length=16), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("launches", sa.Boolean(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_dispatch_lease"),
    )
