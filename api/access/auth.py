"""Authentication: the user behind a request's token or session cookie.

Invariants:

- Wrong secrets count against their client's address; valid ones never do.
- A request that changes something through a session carries the session's CSRF token. A request with a Bearer token
  needs none, because no browser sends that header by itself.

`store/credentials.py` has the rows.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import update
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool

from rhyme_openrlhf.api.access.audit import SAFE_METHODS, note_caller
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.problems import ProblemError, retry_later
from rhyme_openrlhf.api.store.credentials import Principal, Role, digest, find_by_session, find_by_token
from rhyme_openrlhf.api.store.database import BusyError
from rhyme_openrlhf.api.store.models import Token

# Name of the session cookie without the port; `cookie_name` returns the full name.
COOKIE = "rhyme_session"
# Name of the session cookie in the OpenAPI description.
COOKIE_SCHEME = "APIKeyCookie"
CSRF_HEADER = "X-CSRF-Token"
# Least seconds between two writes of `last_used_at`, so that reading does not cause writing.
LAST_USED_STEP_S = 60.0

logger = logging.getLogger(__name__)
_bearer = HTTPBearer(auto_error=False, description="An access token, for scripts and reporters.")


class _SessionCookie(APIKeyCookie):
    """The session cookie of a request, under the name for this service's address."""

    async def __call__(self, request: Request) -> str | None:
        return request.cookies.get(cookie_name(request))


_cookie = _SessionCookie(
    name=COOKIE,
    scheme_name=COOKIE_SCHEME,
    auto_error=False,
    description=f"A browser's session; requests that change something also need {CSRF_HEADER}.",
)


def is_secure(request: Request) -> bool:
    """Return True if the browser uses HTTPS, with this service or with a trusted proxy."""
    service: Service = request.app.state.service
    return service.settings.tls or request.url.scheme == "https"


def cookie_name(request: Request, kind: str = COOKIE) -> str:
    """Return the name of the session cookie, or of a cookie of another kind.

    The name contains the port, because browsers send a host's cookies to all of its ports. Signing in to one of two
    services on a host therefore keeps the other session. The prefix `__Host-` keeps pages without HTTPS from setting
    the cookie.
    """
    port = request.headers.get("host", "").rpartition(":")[2]
    name = f"{kind}_{port}" if port.isascii() and port.isdigit() else kind
    return f"__Host-{name}" if is_secure(request) else name


def _note_use(service: Service, who: Principal, now: float) -> None:
    if who.last_used_at is not None and now - who.last_used_at < LAST_USED_STEP_S:
        return
    try:
        with service.database.writing() as session:
            session.execute(update(Token).where(Token.id == who.token_id).values(last_used_at=now))
    except (BusyError, OperationalError) as error:
        # The database is busy or its disk is full; requests that only read are still answered.
        logger.info("the use of token %d was not noted: %s", who.token_id, type(error).__name__)


async def _authenticate(service: Service, request: Request, bearer: str | None, cookie: str | None) -> Principal:
    """Return the user of a request; raise ProblemError 401, 403 (CSRF) or 429."""
    if bearer is None and cookie is None:
        raise _unauthorized("sign in, or send a token: Authorization: Bearer ...")
    # A token takes precedence over a cookie: a script in a browser's profile is still a script.
    key = ("token", digest(bearer)) if bearer is not None else ("session", digest(cookie or ""))
    # A cached user needs neither the store nor a thread.
    who = service.callers.get(key) or await run_in_threadpool(_look_up, service, key, bearer, cookie)
    if who is None:
        if bearer is None:
            raise _unauthorized("the session is over: sign in again")
        raise refuse_secret(service, request, "the token is unknown, was revoked, or has expired")
    if who.session is not None and request.method not in SAFE_METHODS:
        given = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode(), (who.csrf or "").encode()):
            detail = f"a browser's request that changes something needs the header {CSRF_HEADER}"
            raise ProblemError(403, detail, code="csrf_token_missing")
    if wait := service.limits.requests.take(who.holder):
        raise retry_later(429, "too many requests with this token", wait)
    return who


def _look_up(service: Service, key: tuple[str, str], bearer: str | None, cookie: str | None) -> Principal | None:
    """Look the user up in the store, record the use, and keep the user for the next requests."""
    now = time.time()
    before = service.callers.before_reading()
    with service.database.reading(snapshot=False) as session:
        who = find_by_token(session, bearer, now) if bearer is not None else find_by_session(session, cookie or "", now)
    if who is not None:
        service.callers.put(key, who, before)
        _note_use(service, who, now)
    return who


def refuse_secret(service: Service, request: Request, detail: str) -> ProblemError:
    """Return the response to a wrong token or code, which counts against the client's address: 401 or 429.

    Only wrong secrets are counted, because other users at the same address may have valid ones.
    """
    address = request.client.host if request.client else "unknown"
    if wait := service.limits.sign_ins.take(address):
        return retry_later(429, "too many wrong tokens or sign-in links from this address", wait)
    return _unauthorized(detail)


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(401, detail, headers={"WWW-Authenticate": "Bearer"})


def require(*roles: Role) -> Callable[..., Awaitable[Principal]]:
    """Return a dependency that admits only these roles."""

    async def allowed(
        request: Request,
        service: ServiceDep,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
        cookie: Annotated[str | None, Security(_cookie)],
    ) -> Principal:
        who = await _authenticate(service, request, bearer.credentials if bearer else None, cookie)
        if who.role not in roles:
            raise ProblemError(403, f"a {who.role} may not do this; required role: {', '.join(roles)}")
        if roles == ("operator",):
            note_caller(request, who)
        return who

    return allowed


async def maybe_reader(
    request: Request,
    service: ServiceDep,
    cookie: Annotated[str | None, Security(_cookie)],
) -> Principal | None:
    """Return who is signed in, or None, for pages that anyone may read."""
    try:
        return await _authenticate(service, request, None, cookie)
    except ProblemError:
        return None


MaybeViewer = Annotated[Principal | None, Depends(maybe_reader)]
Viewer = Annotated[Principal, Depends(require("viewer", "operator"))]
Operator = Annotated[Principal, Depends(require("operator"))]
Reporter = Annotated[Principal, Depends(require("reporter", "operator"))]
