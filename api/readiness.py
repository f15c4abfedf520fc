"""Whether the database has the schema that this version works with."""

from __future__ import annotations

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from rhyme_openrlhf.api.database import Database, alembic_config


def schema_is_current(database: Database) -> bool:
    """Raises SQLAlchemyError when the database does not answer."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision() == head
