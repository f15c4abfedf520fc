"""The declarative base of all tables, with the naming of constraints and the portable column types.

Times are unix seconds as float (UTC by definition), like in events. Constraints have fixed names, so that a migration
can drop them on both databases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import JSON, BigInteger, Dialect, Integer, MetaData
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}

# SQLite increments only an INTEGER primary key; PostgreSQL needs 8 bytes for tables with many rows.
BigId = BigInteger().with_variant(Integer(), "sqlite")
Json = JSON().with_variant(JSONB(), "postgresql")


class RedactedJson(TypeDecorator[Any]):
    """JSON whose secrets `redact` hides before storing, and again when reading.

    Reading hides them too, because a database of an earlier version may contain some.
    """

    impl = Json
    cache_ok = True

    def __init__(self, redact: Callable[[Any], Any]) -> None:
        super().__init__()
        self.redact = redact

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Return the stored value."""
        return None if value is None else self.redact(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """Return the value for readers."""
        return None if value is None else self.redact(value)


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMING)
