"""The page `/webhooks`: rules for messages to other services, with a test of each, and the log of messages."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.read.pagination import newest
from rhyme_openrlhf.api.store.models import Webhook, WebhookDelivery
from rhyme_openrlhf.api.store.webhooks import MOST_WEBHOOKS, active_ids, state_of
from rhyme_openrlhf.settings.control import WEBHOOK_EVENTS, WEBHOOK_LIMITS
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep

router = APIRouter(include_in_schema=False)

# Newest messages on the page; the API and `rhyme webhooks log` have all of them.
MESSAGES = 50
# Events in words, and the labels of their limits.
WORDS = dict(zip(WEBHOOK_EVENTS, ("failed", "finished", "stalled", "reward fell", "engines idle"), strict=True))
LABELS = {
    "stalled": "Stalled after minutes",
    "reward_fell": "Reward below its best by",
    "engine_idle": "Engines idle above %",
}


@router.get("/webhooks")
def webhooks_page(page: PageDep, edit: Annotated[str, Query(max_length=20)] = "") -> HTMLResponse:
    """Render webhooks and their log for operators. `edit`: the one that the form changes, "" for a new one."""
    content = _content(page)
    changed = next((row for row, *_ in content["hooks"] if str(row.id) == edit), None)
    limits = [
        (LABELS[event], limit.field, getattr(changed, limit.field) if changed else limit.default)
        for event, limit in WEBHOOK_LIMITS.items()
    ]
    return page.render("webhooks.html", changed=changed, limits=limits, **content)


@router.get("/ui/webhooks/parts/webhooks")
def webhooks_piece(page: PageDep) -> HTMLResponse:
    """Render the lists of webhooks and messages, which are empty for a viewer."""
    return page.render("parts/webhooks.html", **_content(page))


def _content(page: Page) -> dict[str, Any]:
    rows, messages, active = [], [], set()
    if page.may_act:
        with page.service.database.reading() as session:
            rows = newest(session, Webhook, [], MOST_WEBHOOKS, None)[0]
            messages = newest(session, WebhookDelivery, [], MESSAGES, None)[0]
            active = active_ids(session, time.time())
    names = {row.id: row.name for row in rows}
    hooks = [(row, [_told(row, event) for event in row.events], row.id in active) for row in rows]
    log = [(one, names[one.webhook_id], state_of(one)) for one in messages]
    return {"events": WORDS, "hooks": hooks, "messages": log}


def _told(row: Any, event: str) -> str:
    """Return an event with its limit, such as `stalled 30`."""
    limit = WEBHOOK_LIMITS.get(event)
    return f"{WORDS[event]} {getattr(row, limit.field):g}" if limit else WORDS[event]
