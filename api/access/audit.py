"""The audit log: who started, stopped, changed or deleted what, signed in, or made a token, when, and from where.

One middleware writes it for all routes: an entry for each request that succeeded and that only operators may make, or
that opened or closed access (`note_caller`). So a new route is in the log without a line of its own. Reports of runs
are not in it, nor are requests with an idempotency key that found what an earlier one had created.

Invariant: the response is sent after its entry is stored. If the store cannot take the entry, the service's own log
has it, and the response is sent, because what it reports was done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from sqlalchemy import ColumnElement, or_
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rhyme_openrlhf.api.read.pagination import newest
from rhyme_openrlhf.api.store.credentials import Principal
from rhyme_openrlhf.api.store.database import BusyError, Database
from rhyme_openrlhf.api.store.models import ADDRESS_LENGTH, TARGET_LENGTH, AuditEntry

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_CALLER = "audited_caller"

logger = logging.getLogger(__name__)


def note_caller(request: Request, who: Principal) -> None:
    """Have the request in the log if it succeeds, as done by `who`."""
    setattr(request.state, _CALLER, who)


class AuditLog:
    """Middleware that writes the entries. `routes`: by endpoint; a route that creates something answers 201."""

    def __init__(self, app: ASGIApp, database: Database, routes: Mapping[Any, APIRoute], prefix: str) -> None:
        self.app = app
        self._database = database
        self._routes = routes
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self.app(scope, receive, send)
            return
        # Made here, so that a copy of the scope further in has the same.
        state = scope.setdefault("state", {})

        async def send_audited(message: Message) -> None:
            if message["type"] == "http.response.start" and _CALLER in state:
                route, status = self._routes[scope["endpoint"]], message["status"]
                if status == 201 if route.status_code == 201 else status < 400:
                    entry = self._entry(scope, route, state[_CALLER], Headers(raw=message["headers"]))
                    await run_in_threadpool(self._store, entry)
            await send(message)

        await self.app(scope, receive, send_audited)

    def _entry(self, scope: Scope, route: APIRoute, who: Principal, answered: Headers) -> AuditEntry:
        # What was created has an address of its own.
        target = answered.get("location") or scope["path"]
        return AuditEntry(
            time=time.time(),
            token_id=who.token_id,
            name=who.name,
            browser=who.session is not None,
            address=(scope.get("client") or ("unknown",))[0][:ADDRESS_LENGTH],
            action=route.summary or route.name,
            target=target.removeprefix(self._prefix)[:TARGET_LENGTH],
        )

    def _store(self, entry: AuditEntry) -> None:
        try:
            with self._database.writing() as session:
                session.add(entry)
        except (BusyError, OperationalError) as error:
            logger.error(
                "not in the audit log (%s): %s by %s (token %d) from %s: %s",
                type(error).__name__, entry.action, entry.name, entry.token_id, entry.address, entry.target,
            )  # fmt: skip


def audit_entries(
    session: Session, name: str, text: str, limit: int, cursor: str | None
) -> tuple[Sequence[AuditEntry], str | None]:
    """Return a page of entries, the newest first, and the cursor of the next one.

    `name`: of the token, "" for all; `text`: in the action or the target, without regard to case.
    """
    conditions: list[ColumnElement[bool]] = []
    if name:
        conditions.append(AuditEntry.name == name)
    if text:
        found = (column.icontains(text, autoescape=True) for column in (AuditEntry.action, AuditEntry.target))
        conditions.append(or_(*found))
    return newest(session, AuditEntry, conditions, limit, cursor)
