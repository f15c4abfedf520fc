"""Routes for access tokens: list, create, revoke (operators only), and exchange of a sign-in code for a token."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.audit import note_caller
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.fields import LARGEST_PAGE, Cursor, Limit, created_at
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.read.pagination import newest
from rhyme_openrlhf.api.routes.sign_in import USED_UP
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.bounds import INT32, Body, Name, Secret, UidText
from rhyme_openrlhf.api.store.lookup import NotFoundError, find_run
from rhyme_openrlhf.api.store.models import Run, Token

router = APIRouter(prefix="/tokens", tags=["tokens"], responses=documented(401, 403, 422, 429, 503))

# Ten years: longer is meant to be for ever.
MOST_DAYS = 3660.0
SECONDS_PER_DAY = 86_400.0
TokenId = Annotated[int, Path(ge=1, le=INT32)]


class TokenView(BaseModel):
    """A token without its secret."""

    id: int
    name: str
    role: credentials.Role
    prefix: str = Field(description="Its beginning.", examples=["rhyme_Ab3d"])
    run: str | None = Field(description="The only run that a reporter's token may report for.")
    created_at: float
    expires_at: float | None = Field(description="None: it works until it is revoked.")
    last_used_at: float | None
    revoked_at: float | None


class TokenPage(BaseModel):
    """Tokens, the newest first."""

    items: list[TokenView]
    next_cursor: str | None


class NewToken(Body):
    """A new token."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "grafana", "role": "viewer"}]})

    name: Name
    role: credentials.Role
    run: UidText | None = Field(default=None, description="With role reporter: the only run it may report for.")
    days: Annotated[
        float | None,
        Field(gt=0, le=MOST_DAYS, description="It works for so long; without it, until it is revoked.", examples=[90]),
    ] = None


class Exchange(Body):
    """The code of a sign-in link, and the name of the token to create."""

    code: Secret
    name: Name


class IssuedToken(TokenView):
    """A new token; `token` is shown only this once."""

    token: str


@router.get("", summary="List tokens")
def list_tokens(
    who: auth.Operator,
    service: ServiceDep,
    limit: Limit = LARGEST_PAGE,
    cursor: Cursor = None,
    revoked: Annotated[bool, Query(description="Include revoked and expired tokens.")] = False,
) -> TokenPage:
    """List all tokens that work, the newest first."""
    with service.database.reading() as session:
        conditions = [] if revoked else [credentials.is_valid(time.time())]
        rows, following = newest(session, Token, conditions, limit, cursor)
        uids = dict(
            session.execute(select(Run.id, Run.uid).where(Run.id.in_({row.run_id for row in rows if row.run_id})))
            .tuples()
            .all()
        )
        return TokenPage(items=[_view(row, uids.get(row.run_id)) for row in rows], next_cursor=following)


@router.post("", status_code=201, responses=documented(404), summary="Create a token")
def make_token(body: NewToken, response: Response, who: auth.Operator, service: ServiceDep) -> IssuedToken:
    """Create a token; its secret is only in this response."""
    if body.run is not None and body.role != "reporter":
        raise ProblemError(422, "only a reporter's token can belong to one run")
    with service.database.writing() as session:
        run_id = find_run(session, body.run).id if body.run else None
        now = time.time()
        expires = now + SECONDS_PER_DAY * body.days if body.days is not None else None
        issued = credentials.issue_token(session, body.name, body.role, now, run_id, expires, who.token_id)
        created_at(response, f"/tokens/{issued.row.id}")
        return IssuedToken(**_view(issued.row, body.run).model_dump(), token=issued.secret)


@router.get("/{token_id}", responses=documented(404), summary="Show a token")
def get_token(token_id: TokenId, who: auth.Operator, service: ServiceDep) -> TokenView:
    """Return a token without its secret."""
    with service.database.reading() as session:
        row = _find(session, token_id)
        return _view(row, session.scalar(select(Run.uid).where(Run.id == row.run_id)))


@router.post("/exchange", status_code=201, summary="Exchange a sign-in link's code for a token")
def exchange_code(body: Exchange, request: Request, service: ServiceDep) -> IssuedToken:
    """Create an operator's token for the code of a sign-in link, which is then used up; for `rhyme runs login`."""
    now = time.time()
    with service.database.reading(snapshot=False) as session:
        known = body.code.startswith(credentials.CODE_START) and credentials.may_open(session, body.code, now)
    if not known:
        raise auth.refuse_secret(service, request, USED_UP)
    with service.database.writing() as session:
        if not credentials.take_code(session, body.code, now):
            raise auth.refuse_secret(service, request, USED_UP)
        issued = credentials.issue_token(session, body.name, "operator", now)
        note_caller(request, credentials.principal(issued.row, None))
        return IssuedToken(**_view(issued.row, None).model_dump(), token=issued.secret)


@router.delete("/{token_id}", status_code=204, responses=documented(404), summary="Revoke a token")
def revoke_token(token_id: TokenId, who: auth.Operator, service: ServiceDep) -> Response:
    """Revoke a token, and close every browser session that it opened."""
    with service.database.writing() as session:
        credentials.revoke_token(session, _find(session, token_id), time.time())
    service.callers.forget()
    return Response(status_code=204)


def _find(session: Session, token_id: int) -> Token:
    token = session.get(Token, token_id)
    if token is None:
        raise NotFoundError("token", token_id)
    return token


def _view(row: Token, run: str | None) -> TokenView:
    return TokenView(
        id=row.id,
        name=row.name,
        role=credentials.role_of(row),
        prefix=row.prefix,
        run=run,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
