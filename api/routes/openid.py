"""Routes to sign in with an OpenID Connect provider: begin, and end. Neither needs a token or session."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.audit import note_caller
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.problems import ProblemError, documented, retry_later
from rhyme_openrlhf.api.routes.sign_in import Who, set_session_cookie
from rhyme_openrlhf.api.settings import RETURN_PATH
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.bounds import NO_NUL, Body
from rhyme_openrlhf.api.store.models import BrowserSession, Token
from rhyme_openrlhf.api.store.races import again_if_raced

if TYPE_CHECKING:
    from rhyme_openrlhf.api.access.openid import Person, Provider

router = APIRouter(
    prefix="/session/openid", tags=["session"], responses=documented(401, 403, 404, 422, 429, 502, 503, 504)
)

# Cookie of a sign-in that has begun.
COOKIE = "rhyme_sign_in"
# Some providers' codes are signed texts.
LONGEST = 4000
Text = Annotated[str, Field(max_length=LONGEST, pattern=NO_NUL)]


class Beginning(BaseModel):
    """The provider's address, for the browser to go to."""

    address: str


class Answer(Body):
    """The provider's words in the address that the browser came back to: a code, or an error."""

    state: Text
    code: Text = ""
    error: Text = ""


@router.post("/begin", summary="Begin to sign in with the provider")
async def begin_openid(request: Request, response: Response, service: ServiceDep) -> Beginning:
    """Return the provider's address. The browser keeps a cookie, without which the sign-in cannot end."""
    from rhyme_openrlhf.api.access import openid

    provider = _provider(service)
    _limit(service, request, "begin")
    try:
        address, begun = await provider.begin(_redirect_url(provider, request))
    except openid.ProviderError as error:
        raise _provider_problem(error) from error
    response.set_cookie(
        auth.cookie_name(request, COOKIE),
        begun.written(),
        max_age=openid.SIGN_IN_SECONDS,
        httponly=True,
        # The page that the provider sends the browser to posts the answer, and that request is the service's own.
        samesite="strict",
        secure=auth.is_secure(request),
    )
    return Beginning(address=address)


@router.post("", summary="Sign in with the provider's answer")
async def end_openid(body: Answer, request: Request, response: Response, service: ServiceDep) -> Who:
    """Open a browser session for the person whom the provider has signed in: set its cookie, return its CSRF token."""
    from rhyme_openrlhf.api.access import openid

    provider = _provider(service)
    name = auth.cookie_name(request, COOKIE)
    try:
        begun = openid.Begun.read(request.cookies.get(name))
        openid.check_state(begun, body.state)
        if not body.code:
            raise openid.RefusedError("the provider has not signed you in: begin again")
        # Only sign-ins that ask the provider count. Others count as wrong secrets, so they keep nobody from this.
        _limit(service, request, "end")
        person = await provider.person(begun, body.state, body.code, _redirect_url(provider, request))
    except openid.RefusedError as error:
        raise auth.refuse_secret(service, request, str(error)) from error
    except openid.NoRoleError as error:
        await run_in_threadpool(_close, service, error.issuer, error.subject)
        service.callers.forget()
        raise ProblemError(403, str(error)) from error
    except openid.ProviderError as error:
        raise _provider_problem(error) from error
    value, row, token = await run_in_threadpool(_open, service, person)
    note_caller(request, credentials.principal(token, row))
    # The role may be another one than a moment ago.
    service.callers.forget()
    response.delete_cookie(name, httponly=True, samesite="strict", secure=auth.is_secure(request))
    set_session_cookie(service, request, response, value)
    return Who(name=token.name, role=credentials.role_of(token), csrf=row.csrf)


def _open(service: Service, person: Person) -> tuple[str, BrowserSession, Token]:
    def write() -> tuple[str, BrowserSession, Token]:
        with service.database.writing() as session:
            return credentials.open_session_of_person(
                session, person.issuer, person.subject, person.name, person.role, time.time(),
                service.settings.session_hours,
            )  # fmt: skip

    # Two browsers of a person may sign in for the first time at once.
    return again_if_raced(write)


def _close(service: Service, issuer: str, subject: str) -> None:
    """Close what a person has open whom the provider gives no role any more."""
    with service.database.writing() as session:
        credentials.end_person(session, issuer, subject, time.time())


def _limit(service: Service, request: Request, part: str) -> None:
    """Raise ProblemError 429 for too many sign-ins from one address; anyone can begin one, and each takes some work."""
    address = request.client.host if request.client else "unknown"
    if wait := service.limits.provider_sign_ins.take(f"{part} {address}"):
        raise retry_later(429, "too many sign-ins with the provider from this address", wait)


def _provider(service: Service) -> Provider:
    if service.openid is None:
        raise ProblemError(404, "this service has no OpenID Connect provider (--openid.issuer)")
    return service.openid


def _redirect_url(provider: Provider, request: Request) -> str:
    """Return the page that the provider sends the browser to, at the address by which the browser is here."""
    scheme = "https" if auth.is_secure(request) else "http"
    # HostGuard admits only the service's own names.
    return provider.settings.redirect_url or f"{scheme}://{request.headers['host']}{RETURN_PATH}"


def _provider_problem(error: Exception) -> ProblemError:
    return ProblemError(504 if getattr(error, "late", False) else 502, str(error), code="provider_unavailable")
