"""Signing a browser in and out. Signing in is the one call of the API that needs no token: it is given one."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy import delete

from rhyme_openrlhf.api import auth
from rhyme_openrlhf.api.fields import NO_NUL, Body
from rhyme_openrlhf.api.models import BrowserSession
from rhyme_openrlhf.api.problems import ProblemError, documented, retry_later
from rhyme_openrlhf.api.state import ServiceDep

router = APIRouter(tags=["session"], responses=documented(422, 429, 503))


class SignIn(Body):
    """A token, as the first link's fragment or an operator gave it."""

    token: Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL, examples=["rhyme_..."])]


class Who(BaseModel):
    """Who is asking."""

    name: str = Field(examples=["first operator"])
    role: auth.Role
    csrf: str | None = Field(description="For X-CSRF-Token, when a browser's session asks; None for a Bearer token.")


@router.post("/session", responses=documented(401), summary="Sign in")
def sign_in(body: SignIn, request: Request, response: Response, service: ServiceDep) -> Who:
    """Open a browser session: sets an HttpOnly cookie and gives the CSRF token that goes with it."""
    address = auth.client_address(request)
    if wait := service.limits.sign_ins.wait(address):
        raise retry_later(429, "too many wrong tokens from this address", wait)
    with service.database.writing() as session:
        opened = auth.open_session(session, body.token, time.time(), service.settings.session_hours)
        if opened is None:
            service.limits.sign_ins.take(address)
            raise ProblemError(
                401,
                "the token is not known, was revoked, or has no pages to see",
                headers={"WWW-Authenticate": "Bearer"},
            )
        value, row, token = opened
        who = Who(name=token.name, role=auth.role_of(token), csrf=row.csrf)
    response.set_cookie(
        auth.COOKIE,
        value,
        max_age=int(service.settings.session_hours * 3600),
        httponly=True,
        samesite="strict",
        secure=service.settings.tls,
    )
    return who


@router.get("/session", responses=documented(401, 403), summary="Who is signed in")
def who_am_i(who: auth.Viewer) -> Who:
    """Name, role, and the session's CSRF token (a page that was loaded anew asks here)."""
    return Who(name=who.name, role=who.role, csrf=who.csrf)


@router.delete("/session", status_code=204, responses=documented(401, 403), summary="Sign out")
def sign_out(who: auth.Viewer, service: ServiceDep) -> Response:
    """End the session. With a Bearer token nothing happens: revoke it instead."""
    if who.session is not None:
        with service.database.writing() as session:
            session.execute(delete(BrowserSession).where(BrowserSession.digest == who.session))
        service.callers.forget()
    answer = Response(status_code=204)
    answer.delete_cookie(auth.COOKIE, httponly=True, samesite="strict", secure=service.settings.tls)
    return answer
