"""Saved views of the list of runs: filter, order, columns, and metrics and settings to show, under a name.

Page, API, client and command line read and write them by these functions. A view belongs to a token, and thereby to a
person, or to everyone (`EVERYONE`). Everyone reads the views for everyone; only operators change those.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.pagination import Direction
from rhyme_openrlhf.api.read.run_query import MOST_LETTERS, QueryError, parse
from rhyme_openrlhf.api.read.run_values import NAME_PATTERN
from rhyme_openrlhf.api.read.runs import RUN_SORTS, Archived, Origin
from rhyme_openrlhf.api.store.bounds import NO_NUL, TAG_LENGTH
from rhyme_openrlhf.api.store.lookup import NotFoundError
from rhyme_openrlhf.api.store.models import NAME_LENGTH, SavedView
from rhyme_openrlhf.api.store.status import RunStatus

# Owner of the views for everyone; no token has this number.
EVERYONE = 0
# Views that one owner may have: more than anyone finds again in a menu.
MOST_VIEWS = 100
MOST_COLUMNS = 30
# As many metrics and settings as `GET /runs` takes.
MOST_VALUES = 10


class TooManyViewsError(ValueError):
    """The owner has as many views as one may have; the message is one sentence."""


class ViewNameTakenError(ValueError):
    """The owner has a view of this name; the message is one sentence."""


def _condition(text: str) -> str:
    if text.strip():
        try:
            parse(text)
        except QueryError as error:
            raise ValueError(str(error)) from None
    return text


def _sort(name: str) -> str:
    if name not in RUN_SORTS and not NAME_PATTERN.fullmatch(name):
        raise ValueError("must be a field, metric.NAME or config.GROUP.OPTION")
    return name


def _values(names: list[str]) -> list[str]:
    if not all(NAME_PATTERN.fullmatch(name) for name in names):
        raise ValueError("must be metric.NAME or config.GROUP.OPTION")
    return list(dict.fromkeys(names))


Text = Annotated[str, Field(max_length=NAME_LENGTH, pattern=NO_NUL)]


class Shown(BaseModel):
    """The list that a view shows, in the fields of `GET /runs`; `columns`: of the page's table, none for its usual."""

    status: list[RunStatus] = Field(default=[], max_length=20, description="Any of these.")
    origin: list[Origin] = Field(default=[], max_length=3, description="Any of these.")
    tag: Annotated[str, Field(max_length=TAG_LENGTH, pattern=NO_NUL)] = ""
    experiment: Text = Field(default="", description="Its name.")
    text: Text = Field(default="", description="In name, notes or uid.")
    filter: Annotated[str, Field(max_length=MOST_LETTERS, pattern=NO_NUL), AfterValidator(_condition)] = Field(
        default="", description="A condition.", examples=["reward > 0.5"]
    )
    archived: Archived = "no"
    sort: Annotated[str, Field(max_length=NAME_LENGTH), AfterValidator(_sort)] = "created_at"
    direction: Direction = "desc"
    columns: list[Annotated[str, Field(pattern="^[a-z_]{1,40}$")]] = Field(default=[], max_length=MOST_COLUMNS)
    values: Annotated[list[Annotated[str, Field(max_length=NAME_LENGTH, pattern=NO_NUL)]], AfterValidator(_values)] = (
        Field(default=[], max_length=MOST_VALUES, description="metric.NAME or config.GROUP.OPTION.")
    )


FIELDS = tuple(Shown.model_fields)


class SavedViewView(Shown):
    """A saved view."""

    id: int
    name: str
    shared: bool = Field(description="For everyone, not for the holder of one token.")
    created_at: float


def view_of(row: SavedView) -> SavedViewView:
    """Return a row as the API shows it. What another version stored and this one does not take is left out."""
    known = {name: value for name, value in row.content.items() if name in FIELDS}
    try:
        Shown(**known)
    except ValidationError as error:
        for refused in {one["loc"][0] for one in error.errors()}:
            del known[str(refused)]
    return SavedViewView(**known, id=row.id, name=row.name, shared=row.owner == EVERYONE, created_at=row.created_at)


def views_for(session: Session, token_id: int) -> list[SavedViewView]:
    """Return all views that the holder of a token sees, by name, the holder's own first."""
    found = session.scalars(
        select(SavedView).where(visible_to(token_id)).order_by(SavedView.owner == EVERYONE, SavedView.name)
    )
    return [view_of(row) for row in found]


def visible_to(token_id: int) -> Any:
    """Return the condition that the holder of a token sees a view."""
    return or_(SavedView.owner == token_id, SavedView.owner == EVERYONE)


def find_view(session: Session, number: int, token_id: int) -> SavedView:
    """Return a view that the holder of a token sees. Raises NotFoundError."""
    row = session.scalar(select(SavedView).where(SavedView.id == number, visible_to(token_id)))
    if row is None:
        raise NotFoundError("saved view", number)
    return row


def save_view(session: Session, owner: int, name: str, shown: Shown, replace: bool) -> SavedView:
    """Save a view of `owner`; `replace` one of the same name. Raises ViewNameTakenError and TooManyViewsError."""
    same = _named(session, owner, name)
    if same is not None and not replace:
        raise ViewNameTakenError(f"there is a view named “{name}” already")
    if same is None:
        if session.scalars(select(func.count()).where(SavedView.owner == owner)).one() >= MOST_VIEWS:
            raise TooManyViewsError(f"there are {MOST_VIEWS} views already: delete one first")
        same = SavedView(owner=owner, name=name, created_at=time.time())
        session.add(same)
    same.content = shown.model_dump(include=set(FIELDS))
    session.flush()
    return same


def rename_view(session: Session, row: SavedView, name: str) -> None:
    """Give a view another name. Raises ViewNameTakenError."""
    same = _named(session, row.owner, name)
    if same is not None and same.id != row.id:
        raise ViewNameTakenError(f"there is a view named “{name}” already")
    row.name = name
    session.flush()


def _named(session: Session, owner: int, name: str) -> SavedView | None:
    return session.scalar(select(SavedView).where(SavedView.owner == owner, SavedView.name == name))


def page_query(shown: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a view as query parameters of the dashboard's page, without what is at its default."""
    query: list[tuple[str, str]] = []
    for name in FIELDS:
        value = shown[name]
        if value == Shown.model_fields[name].default:
            continue
        if name == "values":
            query.append((name, ", ".join(value)))
        else:
            query += [
                (name, one)
                for one in (value if isinstance(value, Sequence) and not isinstance(value, str) else [value])
            ]
    return query
