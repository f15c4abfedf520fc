"""Accepted tokens whose drafts came from what the responses of all prompts share. Earlier steps have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0013."""
    for table in ("steps", "epochs"):
        op.add_column(table, sa.Column("accepted_shared", sa.BigInteger(), server_default="0", nullable=False))
    # There is one curve more: `Database.upgrade` packs all steps again.
    op.execute("DELETE FROM curve_blocks")
    op.execute("UPDATE runs SET packed_steps = 0")
