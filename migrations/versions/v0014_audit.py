"""Expiry of access tokens, and the audit log. Tokens that are there do not expire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0014."""
    op.add_column("tokens", sa.Column("expires_at", sa.Float(), nullable=True))
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("token_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("browser", sa.Boolean(), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("action", sa.String(200), nullable=False),
        sa.Column("target", sa.String(500), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
