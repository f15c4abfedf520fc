"""Queries of webhooks and of their log."""

from __future__ import annotations

from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.pagination import Order
from rhyme_openrlhf.api.read.runs import page_of
from rhyme_openrlhf.api.store.models import Webhook, WebhookDelivery


def webhooks(session: Session, limit: int, cursor: str | None) -> tuple[list[Webhook], str | None]:
    """Return a page of webhooks, the newest first, and the cursor of the next page."""
    return page_of(session, Webhook, [], Order("id", Webhook.id, Webhook.id, "desc"), limit, cursor)


def deliveries(
    session: Session, webhook_id: int | None, limit: int, cursor: str | None
) -> tuple[list[WebhookDelivery], str | None]:
    """Return a page of messages of one or all webhooks, the newest first, and the cursor of the next page."""
    conditions = [] if webhook_id is None else [WebhookDelivery.webhook_id == webhook_id]
    order = Order("id", WebhookDelivery.id, WebhookDelivery.id, "desc")
    return page_of(session, WebhookDelivery, conditions, order, limit, cursor)
