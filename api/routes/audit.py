"""Route for the audit log, which operators read."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.audit import audit_entries
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import PAGE, Cursor, Limit
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.models import NAME_LENGTH, TARGET_LENGTH

router = APIRouter(prefix="/audit", tags=["audit"], responses=documented(401, 403, 422, 429, 503))


class AuditEntryView(BaseModel):
    """An entry of the audit log."""

    id: int
    time: float
    token_id: int
    name: str = Field(description="The name of the token, also of one that is revoked.")
    browser: bool = Field(description="In a browser's session that the token had opened.")
    address: str
    action: str = Field(examples=["Stop a run"])
    target: str = Field(examples=["/runs/0123456789abcdef/stop"])


class AuditPage(BaseModel):
    """Entries, the newest first."""

    items: list[AuditEntryView]
    next_cursor: str | None


@router.get("", summary="The audit log")
def list_audit(
    who: auth.Operator,
    service: ServiceDep,
    name: Annotated[
        str, Query(max_length=NAME_LENGTH, pattern=NO_NUL, description="Only what this token's holder did.")
    ] = "",
    text: Annotated[
        str, Query(max_length=TARGET_LENGTH, pattern=NO_NUL, description="A part of the action or the target.")
    ] = "",
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> AuditPage:
    """List what operators did, the newest first: starts, stops, changes, deletions, sign-ins, tokens."""
    with service.database.reading() as session:
        rows, following = audit_entries(session, name, text, limit, cursor)
        return AuditPage(
            items=[AuditEntryView.model_validate(row, from_attributes=True) for row in rows],
            next_cursor=following,
        )
