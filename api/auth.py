"""Who is asking: access tokens for scripts, sessions for browsers.

Invariants: a token's or session's secret is kept only as its SHA-256, is shown once, and is never part of a URL that
reaches a server (the first link carries it in its fragment); a revoked token and an expired session open nothing; a
request with a session that changes something carries the session's CSRF token, a request with a Bearer token needs
none, because no browser sends that header by itself.

Roles: a viewer reads; an operator does everything; a reporter only reports, and only its own run if it has one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import delete, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from rhyme_openrlhf.api.database import BusyError
from rhyme_openrlhf.api.models import BrowserSession, Token
from rhyme_openrlhf.api.problems import ProblemError, retry_later
from rhyme_openrlhf.api.state import Service, ServiceDep

Role = Literal["viewer", "operator", "reporter"]
# A token's id, and the digest of the session that was opened with it, None for a Bearer token.
Caller = tuple[int, str | None]

COOKIE = "rhyme_session"
CSRF_HEADER = "X-CSRF-Token"
# 256 random bits: not to be guessed, however many are tried.
SECRET_BYTES = 32
TOKEN_START = "rhyme_"
# What of a token people may see: enough to recognise it, and far too little to use it.
PREFIX_LENGTH = len(TOKEN_START) + 4
# `last_used_at` is written this seldom, so that reading does not become writing.
LAST_USED_STEP_S = 60.0
_ROLES: dict[str, Role] = {"viewer": "viewer", "operator": "operator", "reporter": "reporter"}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

logger = logging.getLogger(__name__)
_bearer = HTTPBearer(auto_error=False, description="An access token, for scripts and reporters.")
_cookie = APIKeyCookie(
    name=COOKIE, auto_error=False, description=f"A browser's session; what changes something needs {CSRF_HEADER} too."
)


@dataclass(frozen=True)
class Principal:
    """Who a request comes from. `session` is the session's digest, None for a Bearer token."""

    token_id: int
    name: str
    role: Role
    run_id: int | None
    session: str | None
    csrf: str | None
    last_used_at: float | None

    @property
    def caller(self) -> Caller:
        """What its right to read hangs on."""
        return self.token_id, self.session


@dataclass(frozen=True)
class Issued:
    """A new token: `secret` is never to be had again."""

    row: Token
    secret: str


def digest(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def issue_token(session: Session, name: str, role: Role, now: float, run_id: int | None = None) -> Issued:
    """Make a token; the caller commits."""
    secret = TOKEN_START + secrets.token_urlsafe(SECRET_BYTES)
    row = Token(
        name=name, role=role, prefix=secret[:PREFIX_LENGTH], digest=digest(secret), run_id=run_id, created_at=now
    )
    session.add(row)
    session.flush()
    return Issued(row, secret)


def issue_first_token(session: Session, now: float) -> Issued | None:
    """An operator's token if there is none that still opens anything; the caller commits and shows it once."""
    usable = select(Token.id).where(Token.role == "operator", Token.revoked_at.is_(None)).limit(1)
    if session.scalar(usable) is not None:
        return None
    return issue_token(session, "first operator", "operator", now)


def sign_in_link(base_url: str, secret: str) -> str:
    """A link for the browser. Fragments stay in the browser: the page posts it to /api/v1/session."""
    return f"{base_url}/#token={secret}"


def revoke_token(session: Session, token: Token, now: float) -> None:
    """Close a token and the sessions that were opened with it; the caller commits."""
    token.revoked_at = token.revoked_at or now
    session.execute(delete(BrowserSession).where(BrowserSession.token_id == token.id))


def open_session(session: Session, secret: str, now: float, hours: float) -> tuple[str, BrowserSession, Token] | None:
    """Sign a browser in: the cookie's value and the session, or None for a token that opens nothing.

    The caller commits. Reporters have no pages to see.
    """
    token = session.scalar(select(Token).where(Token.digest == digest(secret), Token.revoked_at.is_(None)))
    if token is None or token.role == "reporter":
        return None
    session.execute(delete(BrowserSession).where(BrowserSession.expires_at <= now))
    value = secrets.token_urlsafe(SECRET_BYTES)
    row = BrowserSession(
        digest=digest(value),
        token_id=token.id,
        csrf=secrets.token_urlsafe(SECRET_BYTES),
        created_at=now,
        expires_at=now + hours * 3600,
    )
    session.add(row)
    session.flush()
    return value, row, token


def find_by_token(session: Session, secret: str) -> Principal | None:
    """Who has this token, if it opens anything."""
    row = session.scalar(select(Token).where(Token.digest == digest(secret), Token.revoked_at.is_(None)))
    return None if row is None else _principal(row, None)


def find_by_session(session: Session, value: str, now: float) -> Principal | None:
    """Who has this cookie, if its session and the token behind it still hold."""
    found = session.execute(
        select(BrowserSession, Token)
        .join(Token, Token.id == BrowserSession.token_id)
        .where(BrowserSession.digest == digest(value), BrowserSession.expires_at > now, Token.revoked_at.is_(None))
    ).first()
    return None if found is None else _principal(found[1], found[0])


def still_hold(session: Session, callers: Collection[Caller], now: float) -> dict[Caller, bool]:
    """Return for each caller whether it may go on reading; two questions, however many callers there are."""
    ids = {token_id for token_id, _ in callers}
    tokens = set(session.scalars(select(Token.id).where(Token.id.in_(ids), Token.revoked_at.is_(None))))
    digests = {value for _, value in callers if value is not None}
    alive = select(BrowserSession.digest).where(BrowserSession.digest.in_(digests), BrowserSession.expires_at > now)
    sessions = set(session.scalars(alive)) if digests else set()
    return {
        (token_id, value): token_id in tokens and (value is None or value in sessions) for token_id, value in callers
    }


def _principal(row: Token, browser: BrowserSession | None) -> Principal:
    return Principal(
        token_id=row.id,
        name=row.name,
        role=role_of(row),
        run_id=row.run_id,
        session=browser.digest if browser else None,
        csrf=browser.csrf if browser else None,
        last_used_at=row.last_used_at,
    )


def _note_use(service: Service, who: Principal, now: float) -> None:
    if who.last_used_at is not None and now - who.last_used_at < LAST_USED_STEP_S:
        return
    try:
        with service.database.writing() as session:
            session.execute(update(Token).where(Token.id == who.token_id).values(last_used_at=now))
    except (BusyError, OperationalError) as error:
        # Busy, or its disk is full: what only reads is still answered.
        logger.info("the use of token %d was not noted: %s", who.token_id, type(error).__name__)


def role_of(token: Token) -> Role:
    """The role of a token."""
    # The table's own rule lets no other value in.
    return _ROLES[token.role]


async def _authenticate(service: Service, request: Request, bearer: str | None, cookie: str | None) -> Principal:
    """Raises ProblemError: 401, 403 (CSRF), 429."""
    address = client_address(request)
    if bearer is None and cookie is None:
        raise _unauthorized("sign in, or send a token: Authorization: Bearer ...")
    if wait := service.limits.sign_ins.wait(address):
        raise retry_later(429, "too many wrong tokens from this address", wait)
    # A token that is there decides: a script that runs in a browser's profile is still a script.
    key = ("token", digest(bearer)) if bearer is not None else ("session", digest(cookie or ""))
    # Known callers wait neither for the store nor for a thread.
    who = service.callers.get(key) or await run_in_threadpool(_look_up, service, key, bearer, cookie)
    if who is None:
        if bearer is not None:
            service.limits.sign_ins.take(address)
        raise _unauthorized("the token is not known or was revoked" if bearer else "the session is over: sign in again")
    if who.session is not None and request.method not in SAFE_METHODS:
        given = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode(), (who.csrf or "").encode()):
            raise ProblemError(403, f"a browser's request that changes something needs its {CSRF_HEADER}")
    if wait := service.limits.requests.take(f"token {who.token_id}"):
        raise retry_later(429, "too many requests with this token", wait)
    return who


def _look_up(service: Service, key: tuple[str, str], bearer: str | None, cookie: str | None) -> Principal | None:
    """Who the store says it is; noted as used, and kept for the questions that follow."""
    now = time.time()
    before = service.callers.before_reading()
    with service.database.reading(snapshot=False) as session:
        who = find_by_token(session, bearer) if bearer is not None else find_by_session(session, cookie or "", now)
    if who is not None:
        service.callers.put(key, who, before)
        _note_use(service, who, now)
    return who


def client_address(request: Request) -> str:
    """Who is on the other side, as the socket says it (a header could say anything)."""
    return request.client.host if request.client else "unknown"


def _unauthorized(detail: str) -> ProblemError:
    return ProblemError(401, detail, headers={"WWW-Authenticate": "Bearer"})


def require(*roles: Role) -> Callable[..., Awaitable[Principal]]:
    """A dependency that lets only these roles pass."""

    async def allowed(
        request: Request,
        service: ServiceDep,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
        cookie: Annotated[str | None, Security(_cookie)],
    ) -> Principal:
        who = await _authenticate(service, request, bearer.credentials if bearer else None, cookie)
        if who.role not in roles:
            raise ProblemError(403, f"a {who.role} may not do this; it takes: {', '.join(roles)}")
        return who

    return allowed


Viewer = Annotated[Principal, Depends(require("viewer", "operator"))]
Operator = Annotated[Principal, Depends(require("operator"))]
Reporter = Annotated[Principal, Depends(require("reporter", "operator"))]
