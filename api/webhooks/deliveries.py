"""The loop that looks for conditions, sends the messages that are due, and tries again.

Invariants:

- Of several services on one database, one sends a message at a time: a try claims the message first, for longer than
  a try lasts. If the service dies during it, another one sends the message after `CLAIM_SECONDS`.
- A message is tried until a receiver takes it, at most `len(PAUSES) + 1` times. It may arrive twice if a service dies
  between the receiver's response and its storing; a try that was cut off by a death is repeated.
- What waits for a webhook whose maker is no operator any more is given up.
- Each webhook has one request open at a time. No transaction is open meanwhile, so a slow receiver delays only its own
  messages.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from anyio.to_thread import run_sync
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.phases import phases_of
from rhyme_openrlhf.api.read.verdict import verdict_of
from rhyme_openrlhf.api.store.database import Database, DatabaseError
from rhyme_openrlhf.api.store.models import Run, Webhook, WebhookDelivery
from rhyme_openrlhf.api.store.webhooks import NO_OPERATOR, forget_old, is_active
from rhyme_openrlhf.api.webhooks.conditions import Conditions
from rhyme_openrlhf.api.webhooks.sending import SECONDS, Outcome, message_id, post

# Most time until the first try, beside one small query.
POLL_SECONDS = 2.0
# Conditions last for minutes.
CHECK_SECONDS = 30.0
FORGET_SECONDS = 3600.0
# Between tries: a restart of the receiver, a deployment, an outage. 2.6 hours in all.
PAUSES = (10.0, 60.0, 300.0, 1800.0, 7200.0)
# Beyond this, a receiver's wish to wait is not followed.
LONGEST_PAUSE = 7200.0
# A try and the two transactions around it, each of which may wait for the store.
CLAIM_SECONDS = 60.0

logger = logging.getLogger(__name__)
_PASSING = (SQLAlchemyError, DatabaseError)
assert CLAIM_SECONDS > 3 * SECONDS


@dataclass(frozen=True)
class Claimed:
    """A message that this service sends now, as try number `tries`."""

    number: int
    tries: int
    url: str
    form: str
    secret: str
    identity: str
    content: dict[str, Any]


def next_try(tries: int, retry_after: float, now: float) -> float | None:
    """Return when a message is sent again after its failed try number `tries`; None: it is given up."""
    if tries > len(PAUSES):
        return None
    return now + max(PAUSES[tries - 1], min(retry_after, LONGEST_PAUSE))


def _with_verdict(session: Session, content: dict[str, Any]) -> dict[str, Any]:
    """Return a message with what is said of its run now; without, where it is about none or the run was deleted."""
    told = content["run"]
    run = session.scalar(select(Run).where(Run.uid == told["uid"])) if told else None
    if run is None:
        return content
    return {**content, "run": {**told, "verdict": verdict_of(session, run, phases_of(session, run, usual=False)).text}}


class Deliveries:
    """The messages of one store, as one service sends them. `now`: unix seconds."""

    def __init__(self, database: Database, public_only: bool, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._public_only = public_only
        self._now = now
        self._conditions = Conditions(database)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._checked, self._forgot = -math.inf, time.monotonic()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send messages while this context lasts; a request that is open at its end is repeated later."""
        loop = asyncio.create_task(self._run())
        try:
            yield
        finally:
            tasks = [loop, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def turn(self) -> None:
        """Look for conditions if that is due, and begin to send what is due."""
        clock = time.monotonic()
        if clock - self._checked >= CHECK_SECONDS:
            self._checked = clock
            await run_sync(self._conditions.check)
        if clock - self._forgot >= FORGET_SECONDS:
            self._forgot = clock
            await run_sync(self._forget)
        for number in await run_sync(self._due):
            if number not in self._tasks:
                task = self._tasks[number] = asyncio.create_task(self._send_all(number))
                task.add_done_callback(functools.partial(self._done, number))

    async def settled(self) -> None:
        """Wait until nothing is being sent."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _run(self) -> None:
        while True:
            try:
                await self.turn()
            except _PASSING:
                logger.exception("webhooks: the store did not respond; the next turn tries again")
            await asyncio.sleep(POLL_SECONDS)

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("webhook %d: sending was interrupted; it goes on later", number, exc_info=error)

    async def _send_all(self, webhook_id: int) -> None:
        """Send a webhook's messages that are due, one after the other."""
        while (claimed := await run_sync(self._claim, webhook_id)) is not None:
            outcome = await post(
                claimed.url, claimed.form, claimed.secret, claimed.identity, claimed.content, self._public_only
            )
            await run_sync(self._store, claimed, outcome)

    def _due(self) -> list[int]:
        query = select(WebhookDelivery.webhook_id).where(WebhookDelivery.next_at <= self._now()).distinct()
        with self._database.reading(snapshot=False) as session:
            return list(session.scalars(query))

    def _claim(self, webhook_id: int) -> Claimed | None:
        """Return the oldest message that is due, which no other service sends for a while then."""
        now = self._now()
        due = (WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.next_at <= now)
        query = select(WebhookDelivery, Webhook, is_active(now)).join(Webhook).where(*due)
        query = query.order_by(WebhookDelivery.id).limit(1)
        with self._database.writing() as session:
            found = session.execute(query.with_for_update(of=WebhookDelivery, skip_locked=True)).tuples().first()
            if found is None:
                return None
            row, webhook, active = found
            if not active:
                waiting = WebhookDelivery.webhook_id == webhook_id, WebhookDelivery.next_at.is_not(None)
                session.execute(update(WebhookDelivery).where(*waiting).values(next_at=None, error=NO_OPERATOR))
                return None
            row.tries += 1
            row.next_at = now + CLAIM_SECONDS
            identity = message_id(webhook.id, row.key)
            claimed = Claimed(row.id, row.tries, webhook.url, webhook.form, webhook.secret, identity, row.content)
        with self._database.reading() as session:
            return replace(claimed, content=_with_verdict(session, claimed.content))

    def _store(self, claimed: Claimed, outcome: Outcome) -> None:
        """Store the result of a try, unless another service has claimed the message since."""
        with self._database.writing() as session:
            row = session.get(WebhookDelivery, claimed.number, with_for_update=True)
            if row is None or row.tries != claimed.tries:
                return
            now = self._now()
            row.status, row.error = outcome.status, outcome.error
            row.delivered_at = None if outcome.error else now
            row.next_at = next_try(row.tries, outcome.retry_after, now) if outcome.error else None

    def _forget(self) -> None:
        with self._database.writing() as session:
            forget_old(session, self._now())
