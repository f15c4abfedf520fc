"""The idempotency key of the request that resumed a run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0011."""
    op.add_column("attempts", sa.Column("idempotency_key", sa.String(length=200), nullable=True))
