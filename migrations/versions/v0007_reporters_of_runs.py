"""The token that a run belongs to, the attempts that a token or an import vouches for, and imported sources."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0007."""
    op.add_column("runs", sa.Column("reporter_id", sa.Integer(), nullable=True))
    op.add_column("attempts", sa.Column("vouched", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("event_sources", sa.Column("filled", sa.BigInteger(), server_default="0", nullable=False))
    attempts = sa.table("attempts", sa.column("vouched", sa.Boolean()), sa.column("submission_id", sa.String()))
    op.execute(attempts.update().where(attempts.c.submission_id.is_not(None)).values(vouched=True))
