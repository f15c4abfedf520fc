"""Keyset pagination: complete and without repeats, also while rows are added. And pages of lists that are at hand.

A list is ordered by one column and then by a unique one; the cursor holds the last row's two values. Rows without a
value come last in both directions. Invariant: a cursor only continues the order that it came from.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

Direction = Literal["asc", "desc"]
Value = str | int | float | None
Column = InstrumentedAttribute[Any]
Row = TypeVar("Row")
# Far above twice the longest name, so a cursor cannot carry large data.
CURSOR_LENGTH = 4000
INT64 = 2**63


def part_of(rows: Sequence[Row], cursor: str | None, limit: int) -> tuple[Sequence[Row], str | None]:
    """Return a page of rows that are at hand, and the cursor of the next one; here a cursor counts rows."""
    start = int(cursor or 0)
    return rows[start : start + limit], str(start + limit) if start + limit < len(rows) else None


class CursorError(ValueError):
    """A cursor that does not continue the list in its order."""


@dataclass(frozen=True)
class Order:
    """An order of rows. `name`: the client's name of the order; `key`: unique and never null.

    `kind`: the type of a computed column's values; None for a column of a table.
    """

    name: str
    column: ColumnElement[Any] | Column
    key: Column
    direction: Direction = "asc"
    kind: type | None = None

    def by(self) -> tuple[ColumnElement[Any], ...]:
        """Return the columns for `order_by`."""
        column = self.column.desc() if self.direction == "desc" else self.column.asc()
        key = self.key.desc() if self.direction == "desc" else self.key.asc()
        if self.column is self.key:
            return (key,)
        if not self._nullable:
            return column, key
        # Databases differ in where they sort nulls.
        return self.column.is_(None).asc(), column, key

    @property
    def _nullable(self) -> bool:
        return self.kind is not None or bool(self.column.property.columns[0].nullable)

    def values(self, row: Any) -> tuple[Any, Any]:
        """Return what a row of a table is ordered by."""
        assert self.column.key is not None
        return getattr(row, self.column.key), getattr(row, self.key.key)

    def cursor(self, values: tuple[Any, Any]) -> str:
        """Return the cursor after a row that is ordered by these values."""
        content = [self.name, self.direction, *values]
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    def after(self, cursor: str) -> ColumnElement[bool]:
        """Return the condition for `where`: rows after the cursor. Raises CursorError for a cursor of another order."""
        value, key = self._read(cursor)
        descending = self.direction == "desc"
        key_after = self.key < key if descending else self.key > key
        if self.column is self.key:
            return key_after
        if value is None:
            return and_(self.column.is_(None), key_after)
        column_after = self.column < value if descending else self.column > value
        after = or_(column_after, and_(self.column == value, key_after))
        return or_(after, self.column.is_(None)) if self._nullable else after

    def _read(self, cursor: str) -> tuple[Value, Value]:
        try:
            padded = cursor + "=" * (-len(cursor) % 4)
            values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        except (ValueError, binascii.Error, RecursionError) as error:
            raise CursorError("is not a cursor of this list in this order") from error
        if not isinstance(values, list) or len(values) != 4 or values[:2] != [self.name, self.direction]:
            raise CursorError("is not a cursor of this list in this order")
        value, key = values[2:]
        kind = self.kind or self.column.type.python_type
        if not (value is None or _fits(value, kind)) or not _fits(key, self.key.type.python_type):
            raise CursorError("is not a cursor of this list in this order")
        return value, key


def _fits(value: Any, kind: type) -> bool:
    """Return True if a database can compare this value with a column of this kind."""
    if isinstance(value, bool):
        return False
    if kind is str:
        return isinstance(value, str) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, int):
        return -INT64 <= value < INT64
    return kind is float and isinstance(value, float) and math.isfinite(value)


def cut(
    rows: Sequence[Any], limit: int, order: Order, values: Callable[[Any], tuple[Any, Any]] | None = None
) -> tuple[list[Any], str | None]:
    """Split `limit` + 1 requested rows into the page and the cursor of the next page, if there is one.

    `values`: gives what a row is ordered by; without it, rows are objects of a table.
    """
    page = list(rows[:limit])
    return page, order.cursor((values or order.values)(page[-1])) if len(rows) > limit else None


def page_of(
    session: Session,
    table: type[Any],
    conditions: Sequence[ColumnElement[bool]],
    order: Order,
    limit: int,
    cursor: str | None,
) -> tuple[list[Any], str | None]:
    """Return one page of rows of any table, and the cursor of the next page."""
    query = select(table).where(*conditions).order_by(*order.by()).limit(limit + 1)
    if cursor is not None:
        query = query.where(order.after(cursor))
    return cut(session.scalars(query).all(), limit, order)


def newest(
    session: Session, table: type[Any], conditions: Sequence[ColumnElement[bool]], limit: int, cursor: str | None
) -> tuple[list[Any], str | None]:
    """Return one page of rows of a table with an `id`, the newest first."""
    return page_of(session, table, conditions, Order("id", table.id, table.id, "desc"), limit, cursor)
