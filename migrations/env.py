"""Alembic's entry: runs the scripts on the connection that `api/store/database.py` gives, inside its transaction.

For writing a new script, a URL instead: `alembic -c migrations/alembic.ini -x url=sqlite:///new.db revision ...`.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from rhyme_openrlhf.api.store import models, record
from rhyme_openrlhf.api.store.base import Base

# Imported for their tables.
TABLES = (models, record)


def run(connection: Connection) -> None:
    """Run what Alembic was asked for."""
    # SQLite changes few things of a table in place; batch mode copies it.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
