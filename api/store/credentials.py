"""Credentials as rows: access tokens for scripts, sessions for browsers, and one-time codes for sign-in links.

Invariants:

- The secret of a token, session or code is stored only as its SHA-256, and shown once.
- A secret is never part of a URL that reaches a server (a link has its code in the fragment).
- A revoked or expired token, an expired session, and a used or expired code open nothing.

Roles: a viewer reads; an operator does everything; a reporter only reports, and only for its own run if it has one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, and_, delete, or_, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import NAME_LENGTH, BrowserSession, SignInCode, Token

Role = Literal["viewer", "operator", "reporter"]
# A token's id, and the digest of the session that it opened, None for a Bearer token.
Caller = tuple[int, str | None]
# 256 random bits, which cannot be guessed in any number of tries.
SECRET_BYTES = 32
TOKEN_START = "rhyme_"
# Tokens have another beginning.
CODE_START = "once_"
# At the first start no user has access yet, and a service manager's log may be read the next day.
FIRST_CODE_SECONDS = 24 * 3600.0
# A user who restarts the service or requests a link uses it at once, and can get another one.
CODE_SECONDS = 600.0
# The token of sessions opened by links. Its secret is unknown to everyone; its unique prefix finds it.
LINK_TOKEN, LINK_PREFIX = "sign-in link", "link"
# The token of a person whom an OpenID Connect provider signs in. Its digest begins with a word, so it is no secret's.
PERSON_PREFIX = "openid"
# The visible part of a token: enough to recognise it, far too little to use it.
PREFIX_LENGTH = len(TOKEN_START) + 4
DIGEST_LENGTH = 64
# Letters that tell people of one name apart.
MARK_LENGTH = 6
_ROLES: dict[str, Role] = {"viewer": "viewer", "operator": "operator", "reporter": "reporter"}


@dataclass(frozen=True)
class Principal:
    """The user of a request. `session`: the session's digest, None for a Bearer token."""

    token_id: int
    name: str
    role: Role
    run_id: int | None
    session: str | None
    csrf: str | None
    last_used_at: float | None
    # Signed in by a link: all sessions of links belong to one token.
    by_link: bool = False

    @property
    def holder(self) -> str:
        """The one whose use of the service is limited: a token, or one of the sessions that links opened."""
        return f"session {self.session}" if self.by_link else f"token {self.token_id}"

    @property
    def caller(self) -> Caller:
        """The token and session on which the right to read depends."""
        return self.token_id, self.session


@dataclass(frozen=True)
class Issued:
    """A new token; `secret` cannot be read again later."""

    row: Token
    secret: str


def digest(secret: str) -> str:
    """Return the stored digest of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def issue_token(
    session: Session,
    name: str,
    role: Role,
    now: float,
    run_id: int | None = None,
    expires_at: float | None = None,
    maker_id: int | None = None,
) -> Issued:
    """Create a token; the caller commits. `maker_id`: the token of the request."""
    secret = TOKEN_START + secrets.token_urlsafe(SECRET_BYTES)
    row = Token(
        name=name,
        role=role,
        prefix=secret[:PREFIX_LENGTH],
        digest=digest(secret),
        run_id=run_id,
        created_at=now,
        expires_at=expires_at,
        maker_id=maker_id,
    )
    session.add(row)
    session.flush()
    return Issued(row, secret)


def is_valid(now: float) -> ColumnElement[bool]:
    """Return the condition that a token is neither revoked nor expired."""
    return and_(Token.revoked_at.is_(None), or_(Token.expires_at.is_(None), Token.expires_at > now))


def nobody_gets_in(session: Session, now: float) -> bool:
    """Return True if no operator's token is valid."""
    usable = select(Token.id).where(Token.role == "operator", is_valid(now)).limit(1)
    return session.scalar(usable) is None


def issue_code(session: Session, now: float, seconds: float) -> str:
    """Return a new code for one sign-in as an operator within `seconds`; the caller commits and shows it once."""
    session.execute(delete(SignInCode).where(SignInCode.expires_at <= now))
    code = CODE_START + secrets.token_urlsafe(SECRET_BYTES)
    session.add(SignInCode(digest=digest(code), created_at=now, expires_at=now + seconds))
    return code


def take_code(session: Session, code: str, now: float) -> bool:
    """Use up a code; return whether it was valid. Of two concurrent callers, one succeeds. The caller commits."""
    good = SignInCode.digest == digest(code), SignInCode.expires_at > now
    return session.scalar(delete(SignInCode).where(*good).returning(SignInCode.digest)) is not None


def sign_in_link(base_url: str, code: str) -> str:
    """Return a link for the browser. Fragments stay in the browser; the page posts the code to /api/v1/session."""
    return f"{base_url}/#code={code}"


def revoke_token(session: Session, token: Token, now: float) -> None:
    """Revoke a token and delete its sessions; the caller commits."""
    token.revoked_at = token.revoked_at or now
    session.execute(delete(BrowserSession).where(BrowserSession.token_id == token.id))


def open_session(session: Session, secret: str, now: float, hours: float) -> tuple[str, BrowserSession, Token] | None:
    """Sign a browser in with a token or a code; return the cookie's value and the session, or None if it is invalid.

    The caller commits. Reporters cannot sign in.
    """
    if secret.startswith(CODE_START):
        token = _link_token(session, now) if take_code(session, secret, now) else None
    else:
        token = session.scalar(select(Token).where(Token.digest == digest(secret), is_valid(now)))
    if token is None or token.role == "reporter":
        return None
    return *_new_session(session, token, now, hours), token


def open_session_of_person(
    session: Session, issuer: str, subject: str, name: str, role: Role, now: float, hours: float
) -> tuple[str, BrowserSession, Token]:
    """Sign in the person whom the provider `issuer` knows as `subject`; the caller commits.

    All of a person's sessions belong to one token, which has the role and name of the last sign-in. Revoking it closes
    them; the next sign-in makes it valid again, because the provider decides who may sign in. A person who is no
    operator any more loses the tokens that the person made as one.
    """
    known_by = _digest_of_person(issuer, subject)
    token = session.scalar(select(Token).where(Token.digest == known_by))
    if token is None:
        token = issue_token(session, name, role, now).row
        token.prefix, token.digest = PERSON_PREFIX, known_by
    elif role != "operator":
        _revoke_made_by(session, token, now)
    token.name, token.role, token.revoked_at = _own_name(session, name, token), role, None
    return *_new_session(session, token, now, hours), token


def end_person(session: Session, issuer: str, subject: str, now: float) -> None:
    """Close the sessions of a person whom the provider gives no role any more, and revoke tokens that the person made.

    The caller commits.
    """
    token = session.scalar(select(Token).where(Token.digest == _digest_of_person(issuer, subject)))
    if token is not None:
        revoke_token(session, token, now)
        _revoke_made_by(session, token, now)


def _digest_of_person(issuer: str, subject: str) -> str:
    # The ends of both texts are known, so no other pair has this digest. 64 characters in all.
    who = digest(f"{len(issuer)} {issuer} {subject}")
    return f"{PERSON_PREFIX}:{who}"[:DIGEST_LENGTH]


def _own_name(session: Session, name: str, token: Token) -> str:
    """Return the person's name, with a few letters that tell the person from another token of this name."""
    session.flush()
    another = select(Token.id).where(Token.name == name, Token.id != token.id).limit(1)
    if session.scalar(another) is None:
        return name
    mark = f" ({token.digest.partition(':')[2][:MARK_LENGTH]})"
    return name[: NAME_LENGTH - len(mark)] + mark


def _revoke_made_by(session: Session, token: Token, now: float) -> None:
    """Revoke the tokens of viewers and operators that this one made, and those that they made.

    Also of one that is revoked already: what it made is not. Reporters' tokens stay, because runs under way report with
    them, and they do nothing else. A maker is older than what it made, so this ends.
    """
    makers = {token.id}
    while makers:
        made = select(Token).where(Token.maker_id.in_(makers), Token.role != "reporter")
        rows = list(session.scalars(made))
        for one in rows:
            revoke_token(session, one, now)
        session.flush()
        makers = {one.id for one in rows}


def _new_session(session: Session, token: Token, now: float, hours: float) -> tuple[str, BrowserSession]:
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
    return value, row


def _link_token(session: Session, now: float) -> Token:
    """Return the operator's token of all sessions opened by links; revoking it closes them."""
    query = select(Token).where(Token.prefix == LINK_PREFIX, Token.revoked_at.is_(None)).order_by(Token.id).limit(1)
    token = session.scalar(query)
    if token is None:
        token = issue_token(session, LINK_TOKEN, "operator", now).row
        token.prefix = LINK_PREFIX
    return token


def may_open(session: Session, secret: str, now: float) -> bool:
    """Return True if a token or code is known, so that unknown ones never block the store's writers."""
    if secret.startswith(CODE_START):
        code = select(SignInCode.digest).where(SignInCode.digest == digest(secret), SignInCode.expires_at > now)
        return session.scalar(code) is not None
    return find_by_token(session, secret, now) is not None


def find_by_token(session: Session, secret: str, now: float) -> Principal | None:
    """Return the user of this token if it is valid."""
    row = session.scalar(select(Token).where(Token.digest == digest(secret), is_valid(now)))
    return None if row is None else principal(row, None)


def find_by_session(session: Session, value: str, now: float) -> Principal | None:
    """Return the user of this cookie if its session and token are valid."""
    found = session.execute(
        select(BrowserSession, Token)
        .join(Token, Token.id == BrowserSession.token_id)
        .where(BrowserSession.digest == digest(value), BrowserSession.expires_at > now, is_valid(now))
    ).first()
    return None if found is None else principal(found[1], found[0])


def still_hold(session: Session, callers: Collection[Caller], now: float) -> dict[Caller, bool]:
    """Return for each caller whether it may still read, with two queries for any number of callers."""
    ids = {token_id for token_id, _ in callers}
    tokens = set(session.scalars(select(Token.id).where(Token.id.in_(ids), is_valid(now))))
    digests = {value for _, value in callers if value is not None}
    alive = select(BrowserSession.digest).where(BrowserSession.digest.in_(digests), BrowserSession.expires_at > now)
    sessions = set(session.scalars(alive)) if digests else set()
    return {
        (token_id, value): token_id in tokens and (value is None or value in sessions) for token_id, value in callers
    }


def principal(row: Token, browser: BrowserSession | None) -> Principal:
    """Return the user of a token, in a browser's session if there is one."""
    return Principal(
        token_id=row.id,
        name=row.name,
        role=role_of(row),
        run_id=row.run_id,
        session=browser.digest if browser else None,
        csrf=browser.csrf if browser else None,
        last_used_at=row.last_used_at,
        by_link=row.prefix == LINK_PREFIX,
    )


def role_of(token: Token) -> Role:
    """Return the role of a token."""
    # The table's constraint admits no other value.
    return _ROLES[token.role]
