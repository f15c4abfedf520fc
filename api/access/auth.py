"""Who is asking: access tokens for scripts, sessions for browsers, and one-time codes for sign-in links.

Invariants: the secret of a token, session or code is kept only as its SHA-256, is shown once, and is never part of a
URL that reaches a server (a link carries its code in the fragment); a revoked token, an expired session and a code that
was taken or is too old open nothing; wrong secrets are counted against their address, right ones never; a request with
a session that changes something carries the session's CSRF token, a request with a Bearer token needs none, because no
browser sends that header by itself.

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

from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.problems import ProblemError, retry_later
from rhyme_openrlhf.api.store.database import BusyError
from rhyme_openrlhf.api.store.models import BrowserSession, SignInCode, Token

Role = Literal["viewer", "operator", "reporter"]
# A token's id, and the digest of the session that was opened with it, None for a Bearer token.
Caller = tuple[int, str | None]

# The whole name is `cookie_name`'s.
COOKIE = "rhyme_session"
# What the API's description calls the session cookie.
COOKIE_SCHEME = "APIKeyCookie"
CSRF_HEADER = "X-CSRF-Token"
# 256 random bits: not to be guessed, however many are tried.
SECRET_BYTES = 32
TOKEN_START = "rhyme_"
# No token begins so.
CODE_START = "once_"
# Nobody gets in yet, and a service manager's log may be read the next day.
FIRST_CODE_SECONDS = 24 * 3600.0
# Whoever starts a service again, or asks for a link, is there to follow it, and can have another one.
CODE_SECONDS = 600.0
# The token behind the sessions of links. Nobody has its secret; the prefix, which no other token has, finds it.
LINK_TOKEN, LINK_PREFIX = "sign-in link", "link"
# What of a token people may see: enough to recognise it, and far too little to use it.
PREFIX_LENGTH = len(TOKEN_START) + 4
# `last_used_at` is written this seldom, so that reading does not become writing.
LAST_USED_STEP_S = 60.0
_ROLES: dict[str, Role] = {"viewer": "viewer", "operator": "operator", "reporter": "reporter"}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

logger = logging.getLogger(__name__)
_bearer = HTTPBearer(auto_error=False, description="An access token, for scripts and reporters.")


class _SessionCookie(APIKeyCookie):
    """The session cookie of a request, under the name that this service's address gives it."""

    async def __call__(self, request: Request) -> str | None:
        return request.cookies.get(cookie_name(request))


_cookie = _SessionCookie(
    name=COOKIE,
    scheme_name=COOKIE_SCHEME,
    auto_error=False,
    description=f"A browser's session; what changes something needs {CSRF_HEADER} too.",
)


def is_secure(request: Request) -> bool:
    """Whether the browser speaks HTTPS, with this service or with a trusted proxy."""
    service: Service = request.app.state.service
    return service.settings.tls or request.url.scheme == "https"


def cookie_name(request: Request) -> str:
    """Return the name of the session cookie.

    Browsers send a host's cookies to all of its ports, so the name has the port that the browser asks: two services on
    one host sign nobody out of the other. `__Host-` keeps pages that are not HTTPS from setting the cookie.
    """
    port = request.headers.get("host", "").rpartition(":")[2]
    name = f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE
    return f"__Host-{name}" if is_secure(request) else name


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


def nobody_gets_in(session: Session) -> bool:
    """Whether no operator's token opens anything."""
    usable = select(Token.id).where(Token.role == "operator", Token.revoked_at.is_(None)).limit(1)
    return session.scalar(usable) is None


def issue_code(session: Session, now: float, seconds: float) -> str:
    """Return a new code, good for one sign-in as an operator within `seconds`; the caller commits and shows it once."""
    session.execute(delete(SignInCode).where(SignInCode.expires_at <= now))
    code = CODE_START + secrets.token_urlsafe(SECRET_BYTES)
    session.add(SignInCode(digest=digest(code), created_at=now, expires_at=now + seconds))
    return code


def take_code(session: Session, code: str, now: float) -> bool:
    """Whether this code is good. It opens nothing more after the caller has committed; of two callers one gets it."""
    good = SignInCode.digest == digest(code), SignInCode.expires_at > now
    return session.scalar(delete(SignInCode).where(*good).returning(SignInCode.digest)) is not None


def sign_in_link(base_url: str, code: str) -> str:
    """Return a link for the browser. Fragments stay in the browser: the page posts the code to /api/v1/session."""
    return f"{base_url}/#code={code}"


def revoke_token(session: Session, token: Token, now: float) -> None:
    """Close a token and the sessions that were opened with it; the caller commits."""
    token.revoked_at = token.revoked_at or now
    session.execute(delete(BrowserSession).where(BrowserSession.token_id == token.id))


def open_session(session: Session, secret: str, now: float, hours: float) -> tuple[str, BrowserSession, Token] | None:
    """Sign a browser in with a token or a code: the cookie's value and the session, or None if it opens nothing.

    The caller commits. Reporters have no pages to see.
    """
    if secret.startswith(CODE_START):
        token = _link_token(session, now) if take_code(session, secret, now) else None
    else:
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


def _link_token(session: Session, now: float) -> Token:
    """Return the operator's token that all sessions of links belong to: to revoke it closes them."""
    query = select(Token).where(Token.prefix == LINK_PREFIX, Token.revoked_at.is_(None)).order_by(Token.id).limit(1)
    token = session.scalar(query)
    if token is None:
        token = issue_token(session, LINK_TOKEN, "operator", now).row
        token.prefix = LINK_PREFIX
    return token


def may_open(session: Session, secret: str, now: float) -> bool:
    """Whether a token or code is known, so that only those who know one make the store's writers wait."""
    if secret.startswith(CODE_START):
        code = select(SignInCode.digest).where(SignInCode.digest == digest(secret), SignInCode.expires_at > now)
        return session.scalar(code) is not None
    return find_by_token(session, secret) is not None


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
    if bearer is None and cookie is None:
        raise _unauthorized("sign in, or send a token: Authorization: Bearer ...")
    # A token that is there decides: a script that runs in a browser's profile is still a script.
    key = ("token", digest(bearer)) if bearer is not None else ("session", digest(cookie or ""))
    # Known callers wait neither for the store nor for a thread.
    who = service.callers.get(key) or await run_in_threadpool(_look_up, service, key, bearer, cookie)
    if who is None:
        if bearer is None:
            raise _unauthorized("the session is over: sign in again")
        raise refuse_secret(service, request, "the token is not known or was revoked")
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


def refuse_secret(service: Service, request: Request, detail: str) -> ProblemError:
    """Return the answer to a wrong token or code, which is counted against the client's address: 401, or 429.

    Only wrong ones are counted, because others at the same address have right ones.
    """
    address = request.client.host if request.client else "unknown"
    if wait := service.limits.sign_ins.take(address):
        return retry_later(429, "too many wrong tokens or sign-in links from this address", wait)
    return _unauthorized(detail)


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
