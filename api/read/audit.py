"""Queries of the audit log."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, or_
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.pagination import Order
from rhyme_openrlhf.api.read.runs import page_of
from rhyme_openrlhf.api.store.models import AuditEntry


def audit_entries(
    session: Session, name: str, text: str, limit: int, cursor: str | None
) -> tuple[Sequence[AuditEntry], str | None]:
    """Return a page of entries, the newest first, and the cursor of the next one.

    `name`: of the token, "" for all; `text`: in the action or the target, without regard to case.
    """
    conditions: list[ColumnElement[bool]] = []
    if name:
        conditions.append(AuditEntry.name == name)
    if text:
        found = (column.icontains(text, autoescape=True) for column in (AuditEntry.action, AuditEntry.target))
        conditions.append(or_(*found))
    return page_of(session, AuditEntry, conditions, Order("id", AuditEntry.id, AuditEntry.id, "desc"), limit, cursor)
