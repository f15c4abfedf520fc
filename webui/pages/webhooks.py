"""The page `/webhooks`: rules for messages to other services, with a test of each, and the log of messages."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.read import webhooks as read
from rhyme_openrlhf.api.store.webhooks import MOST_WEBHOOKS, state_of
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep

router = APIRouter(include_in_schema=False)

# Newest messages on the page; the API and `rhyme webhooks log` have all of them.
MESSAGES = 50
# Events with their words in the form and the list, and the fields of their limits: name, words, default.
EVENTS: dict[str, tuple[str, str, str, float]] = {
    "failed": ("failed", "", "", 0),
    "finished": ("finished", "", "", 0),
    "stalled": ("stalled", "stalled_minutes", "Stalled after minutes", 30),
    "reward_fell": ("reward fell", "reward_fall", "Reward below its best by", 0.1),
    "engine_idle": ("engines idle", "idle_percent", "Engines idle above %", 50),
}


@router.get("/webhooks")
def webhooks_page(page: PageDep) -> HTMLResponse:
    """Render webhooks and their log for operators."""
    return page.render("webhooks.html", **_content(page))


@router.get("/ui/webhooks/parts/webhooks")
def webhooks_piece(page: PageDep) -> HTMLResponse:
    """Render the lists of webhooks and messages, which are empty for a viewer."""
    return page.render("parts/webhooks.html", **_content(page))


def _content(page: Page) -> dict[str, Any]:
    rows, messages = [], []
    if page.may_act:
        with page.service.database.reading() as session:
            rows = read.webhooks(session, MOST_WEBHOOKS, None)[0]
            messages = read.deliveries(session, None, MESSAGES, None)[0]
    names = {row.id: row.name for row in rows}
    hooks = [(row, [_told(row, event) for event in row.events]) for row in rows]
    log = [(one, names[one.webhook_id], state_of(one)) for one in messages]
    return {"events": EVENTS, "hooks": hooks, "messages": log}


def _told(row: Any, event: str) -> str:
    """Return an event with its limit, such as `stalled 30`."""
    words, field, _, _ = EVENTS[event]
    return f"{words} {getattr(row, field):g}" if field else words
