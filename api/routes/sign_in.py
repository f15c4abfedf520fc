"""Routes to sign a browser in and out. Signing in needs neither a token nor a session."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy import delete

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.audit import note_caller
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.bounds import Body, Secret
from rhyme_openrlhf.api.store.models import BrowserSession

router = APIRouter(tags=["session"], responses=documented(422, 429, 503))


USED_UP = "the sign-in link is used up or too old: `rhyme serve --new-link` prints a new one"


class SignIn(Body):
    """An operator's token, or the one-time code of a sign-in link."""

    token: Secret


class Who(BaseModel):
    """The signed-in user."""

    name: str = Field(examples=["first operator"])
    role: credentials.Role
    csrf: str | None = Field(description="Value for X-CSRF-Token in a browser's session; null with a Bearer token.")


@router.post("/session", responses=documented(401), summary="Sign in")
def sign_in(body: SignIn, request: Request, response: Response, service: ServiceDep) -> Who:
    """Open a browser session: set an HttpOnly cookie, and return its CSRF token."""
    now = time.time()
    wrong = "the token is unknown, was revoked, has expired, or is a reporter's token"
    detail = USED_UP if body.token.startswith(credentials.CODE_START) else wrong
    with service.database.reading(snapshot=False) as session:
        if not credentials.may_open(session, body.token, now):
            raise auth.refuse_secret(service, request, detail)
    with service.database.writing() as session:
        opened = credentials.open_session(session, body.token, now, service.settings.session_hours)
        if opened is None:
            raise auth.refuse_secret(service, request, detail)
        value, row, token = opened
        note_caller(request, credentials.principal(token, row))
        who = Who(name=token.name, role=credentials.role_of(token), csrf=row.csrf)
    set_session_cookie(service, request, response, value)
    return who


def set_session_cookie(service: Service, request: Request, response: Response, value: str) -> None:
    """Give the browser the cookie of its session."""
    response.set_cookie(
        auth.cookie_name(request),
        value,
        max_age=int(service.settings.session_hours * 3600),
        httponly=True,
        samesite="strict",
        secure=auth.is_secure(request),
    )


@router.get("/session", responses=documented(401, 403), summary="Who is signed in")
def who_am_i(who: auth.Viewer) -> Who:
    """Return name, role, and the session's CSRF token, for a reloaded page."""
    return Who(name=who.name, role=who.role, csrf=who.csrf)


@router.delete("/session", status_code=204, responses=documented(401, 403), summary="Sign out")
def sign_out(who: auth.Viewer, request: Request, service: ServiceDep) -> Response:
    """End the session. A Bearer token is not affected; revoke it instead."""
    note_caller(request, who)
    if who.session is not None:
        with service.database.writing() as session:
            session.execute(delete(BrowserSession).where(BrowserSession.digest == who.session))
        service.callers.forget()
    answer = Response(status_code=204)
    answer.delete_cookie(auth.cookie_name(request), httponly=True, samesite="strict", secure=auth.is_secure(request))
    return answer
