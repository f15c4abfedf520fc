"""Messages of webhooks as rows: what is sent, to whom, and whether it was.

Invariants:

- The message of a run's end is stored in the transaction that ends the run, so neither exists without the other.
- A webhook has one message for each thing that happens (its `key`), however many services and attempts to send it.
- A webhook says nothing to anybody once its maker is no operator any more (`is_active`).
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import ColumnElement, delete, or_, select
from sqlalchemy.orm import Session, object_session

from rhyme_openrlhf.api.store.credentials import is_valid
from rhyme_openrlhf.api.store.models import Attempt, Run, Token, Webhook, WebhookDelivery
from rhyme_openrlhf.settings.control import WebhookEvent

Form = Literal["json", "slack"]
State = Literal["waiting", "delivered", "failed"]
TEST = "test"
NO_OPERATOR = "its maker is no operator any more: an operator has to save the webhook again"
# Webhooks that may exist: each may have one request open at a time.
MOST_WEBHOOKS = 50
# The beginning of secrets of the Standard Webhooks specification, whose signature is used.
SECRET_START = "whsec_"
SECRET_BYTES = 32
# A traceback's last lines; the run's page has all of it.
MESSAGE_LENGTH = 500
# The log is for questions about the last weeks.
KEPT_SECONDS = 30 * 86_400.0
_OF_STATUS: dict[str, WebhookEvent] = {
    "failed": "failed", "crashed": "failed", "lost": "failed", "succeeded": "finished", "stopped": "finished",
}  # fmt: skip


def new_secret() -> str:
    """Return a secret for signatures."""
    return SECRET_START + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def is_active(now: float) -> ColumnElement[bool]:
    """Return the condition that the token which made or last changed a webhook is still valid, and an operator's."""
    operators = select(Token.id).where(Token.role == "operator", is_valid(now))
    return or_(Webhook.maker_id.is_(None), Webhook.maker_id.in_(operators))


def active_ids(session: Session, now: float) -> set[int]:
    """Return the ids of webhooks that send messages."""
    return set(session.scalars(select(Webhook.id).where(is_active(now))))


def note_end(run: Run, attempt: Attempt, when: float) -> None:
    """Store the messages of an attempt's end, in the transaction of the two rows.

    An imported run ended before it was known here, so it has none.
    """
    session = object_session(attempt)
    assert session is not None
    event = _OF_STATUS[attempt.status]
    if run.origin == "imported":
        return
    reason = f": {attempt.message[:MESSAGE_LENGTH]}" if attempt.message else ""
    for webhook in session.scalars(select(Webhook).where(is_active(time.time()))):
        if event in webhook.events:
            content = content_of(webhook, event, when, f"Run “{run.name}” has ended as {attempt.status}{reason}", run)
            enqueue(session, webhook, f"{attempt.uid}_{attempt.status}", content)


def enqueue(session: Session, webhook: Webhook, key: str, content: Mapping[str, Any]) -> None:
    """Store a message to send now, unless the webhook has one with this key."""
    same = select(WebhookDelivery.id).where(WebhookDelivery.webhook_id == webhook.id, WebhookDelivery.key == key)
    if session.scalar(same) is None:
        now = time.time()
        row = {"webhook_id": webhook.id, "key": key, "event": content["event"], "content": dict(content)}
        session.add(WebhookDelivery(**row, created_at=now, next_at=now))


def content_of(
    webhook: Webhook, event: str, when: float, text: str, run: Run | None = None, **figures: float
) -> dict[str, Any]:
    """Return a message as the JSON that receivers get. `figures`: the measured value and the webhook's limit."""
    content: dict[str, Any] = {"event": event, "time": when, "webhook": webhook.name, "text": text, "run": None}
    content |= figures
    if run is not None:
        fields = ("uid", "name", "status", "step", "steps_total", "reward")
        url = f"{webhook.service_url}/runs/{run.uid}"
        content["run"] = {**{name: getattr(run, name) for name in fields}, "url": url}
    return content


def forget_old(session: Session, now: float) -> None:
    """Delete messages that are no longer sent from the log after `KEPT_SECONDS`."""
    old = WebhookDelivery.next_at.is_(None), WebhookDelivery.created_at < now - KEPT_SECONDS
    session.execute(delete(WebhookDelivery).where(*old))


def state_of(row: WebhookDelivery) -> State:
    """Return whether a message waits for a try, was taken, or is given up."""
    if row.delivered_at is not None:
        return "delivered"
    return "failed" if row.next_at is None else "waiting"
