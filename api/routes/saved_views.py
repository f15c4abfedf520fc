"""Routes for saved views of the list of runs: list, save, show, rename, delete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.audit import note_caller
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import LARGEST_PAGE, Cursor, Limit, created_at
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.read.pagination import newest
from rhyme_openrlhf.api.read.saved_views import (
    EVERYONE,
    SavedViewView,
    Shown,
    TooManyViewsError,
    ViewNameTakenError,
    find_view,
    rename_view,
    save_view,
    view_of,
    visible_to,
)
from rhyme_openrlhf.api.store.bounds import INT32, Body, Name
from rhyme_openrlhf.api.store.credentials import Principal
from rhyme_openrlhf.api.store.models import SavedView
from rhyme_openrlhf.api.store.races import again_if_raced

router = APIRouter(prefix="/views", tags=["views"], responses=documented(401, 403, 422, 429, 503))

ViewId = Annotated[int, Path(ge=1, le=INT32)]


class SavedViewPage(BaseModel):
    """Saved views, the newest first."""

    items: list[SavedViewView]
    next_cursor: str | None


class NewView(Shown):
    """A view to save."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"name": "good", "filter": "reward > 0.5", "values": ["config.actor.adam.lr"], "shared": True}]
        },
    )

    name: Name
    shared: bool = Field(default=False, description="For everyone; only operators save those.")
    replace: bool = Field(default=False, description="Replace a view of this name.")


class ViewChange(Body):
    """A view's new name."""

    name: Name


@router.get("", summary="List saved views")
def list_views(
    who: auth.Viewer, service: ServiceDep, limit: Limit = LARGEST_PAGE, cursor: Cursor = None
) -> SavedViewPage:
    """List this token's views and those for everyone, the newest first."""
    with service.database.reading() as session:
        rows, following = newest(session, SavedView, [visible_to(who.token_id)], limit, cursor)
        return SavedViewPage(items=[view_of(row) for row in rows], next_cursor=following)


@router.post("", status_code=201, responses=documented(409), summary="Save a view")
def make_view(
    body: NewView, request: Request, response: Response, who: auth.Viewer, service: ServiceDep
) -> SavedViewView:
    """Save a view of the list of runs."""
    owner = EVERYONE if body.shared else who.token_id
    _admit(owner, who, request)

    def save() -> SavedViewView:
        with service.database.writing() as session, _refusing():
            row = save_view(session, owner, body.name, body, body.replace)
            created_at(response, f"/views/{row.id}")
            return view_of(row)

    return again_if_raced(save)


@router.get("/{view_id}", responses=documented(404), summary="Show a saved view")
def get_view(view_id: ViewId, who: auth.Viewer, service: ServiceDep) -> SavedViewView:
    """Return a view."""
    with service.database.reading() as session:
        return view_of(find_view(session, view_id, who.token_id))


@router.patch("/{view_id}", responses=documented(404, 409), summary="Rename a saved view")
def edit_view(
    view_id: ViewId, body: ViewChange, request: Request, who: auth.Viewer, service: ServiceDep
) -> SavedViewView:
    """Give a view another name."""

    def rename() -> SavedViewView:
        with service.database.writing() as session, _refusing():
            row = _mine(session, view_id, who, request)
            rename_view(session, row, body.name)
            return view_of(row)

    return again_if_raced(rename)


@router.delete("/{view_id}", status_code=204, responses=documented(404), summary="Delete a saved view")
def delete_view(view_id: ViewId, request: Request, who: auth.Viewer, service: ServiceDep) -> Response:
    """Delete a view; its runs stay."""
    with service.database.writing() as session:
        session.delete(_mine(session, view_id, who, request))
    return Response(status_code=204)


@contextmanager
def _refusing() -> Iterator[None]:
    """Convert refusals to problems."""
    try:
        yield
    except ViewNameTakenError as error:
        raise ProblemError(409, str(error), code="name_taken") from error
    except TooManyViewsError as error:
        raise ProblemError(409, str(error)) from error


def _mine(session: Session, view_id: int, who: Principal, request: Request) -> SavedView:
    """Return a view that the user may change. Raises NotFoundError and ProblemError."""
    row = find_view(session, view_id, who.token_id)
    _admit(row.owner, who, request)
    return row


def _admit(owner: int, who: Principal, request: Request) -> None:
    """Refuse a change of a view for everyone by others than operators, and have an operator's in the audit log."""
    if owner != EVERYONE:
        return
    if who.role != "operator":
        raise ProblemError(403, "only operators save and change views for everyone")
    note_caller(request, who)
