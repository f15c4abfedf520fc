"""Webhooks in a store."""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Webhook
from rhyme_openrlhf.api.store.webhooks import new_secret


def webhook(store: Database, url: str, *events: str, **more: Any) -> Webhook:
    values = {"form": "json", "stalled_minutes": 30, "reward_fall": 0.1, "idle_percent": 50, **more}
    with store.writing() as session:
        row = Webhook(
            name="team", url=url, events=list(events), secret=new_secret(), service_url="http://here", created_at=1.0,
            **values,
        )  # fmt: skip
        session.add(row)
    return row
