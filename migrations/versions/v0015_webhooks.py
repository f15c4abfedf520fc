"""Webhooks, and their deliveries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0015."""
    json = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("events", json, nullable=False),
        sa.Column("stalled_minutes", sa.Float(), nullable=False),
        sa.Column("reward_fall", sa.Float(), nullable=False),
        sa.Column("idle_percent", sa.Float(), nullable=False),
        sa.Column("secret", sa.String(64), nullable=False),
        sa.Column("service_url", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("webhook_id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("content", json, nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Float(), nullable=True),
        sa.Column("delivered_at", sa.Float(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name=op.f("fk_webhook_deliveries_webhook_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint("webhook_id", "key", name=op.f("uq_webhook_deliveries_webhook_id_key")),
    )
    op.create_index(op.f("ix_webhook_deliveries_next_at"), "webhook_deliveries", ["next_at"])
