"""The token that made another one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0017."""
    op.add_column("tokens", sa.Column("maker_id", sa.Integer(), nullable=True))
    op.create_index(op.f("ix_tokens_maker_id"), "tokens", ["maker_id"])
