"""Tables of machine samples (SystemSample), and the KV cache usage of engines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Upgrade the schema to version 0003."""
    op.add_column("engine_samples", sa.Column("kv_cache", sa.Float(), nullable=True))
    op.create_table(
        "system_samples",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("node", sa.String(length=253), nullable=False),
        sa.Column("cpu", sa.Float(), nullable=True),
        sa.Column("load", sa.Float(), nullable=True),
        sa.Column("memory_used", sa.BigInteger(), nullable=False),
        sa.Column("memory_total", sa.BigInteger(), nullable=False),
        sa.Column("disk_free", sa.BigInteger(), nullable=True),
        sa.Column("shared_memory", sa.BigInteger(), nullable=True),
        sa.Column("object_store", sa.BigInteger(), nullable=True),
        sa.Column("gpus", sa.Text(), nullable=False),
        sa.Column("processes", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_system_samples"),
    )
    op.create_index("ix_system_samples_run_time", "system_samples", ["run_id", "time"])
