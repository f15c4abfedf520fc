"""Accepted tokens whose drafts came from responses of earlier runs. Earlier steps have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the schema to version 0019."""
    for table in ("steps", "epochs"):
        op.add_column(table, sa.Column("accepted_earlier", sa.BigInteger(), server_default="0", nullable=False))
    # The share of drafts from history has changed, so the service makes the blocks of curves anew.
    op.execute("DELETE FROM curve_blocks")
    op.execute("UPDATE runs SET packed_steps = 0")
