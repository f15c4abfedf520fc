"""Routes for webhooks and their log, which operators alone see: a receiver's address is often a secret."""

from __future__ import annotations

import time
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AfterValidator, ConfigDict, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.fields import LARGEST_PAGE, PAGE, Cursor, Limit, created_at
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.read.pagination import newest
from rhyme_openrlhf.api.store.bounds import INT32, NO_NUL, Body, Name, View
from rhyme_openrlhf.api.store.lookup import NotFoundError
from rhyme_openrlhf.api.store.models import Webhook, WebhookDelivery
from rhyme_openrlhf.api.store.webhooks import (
    MOST_WEBHOOKS,
    TEST,
    Form,
    State,
    active_ids,
    content_of,
    new_secret,
    state_of,
)
from rhyme_openrlhf.api.webhooks.sending import Outcome, message_id, post
from rhyme_openrlhf.settings.control import WEBHOOK_EVENTS, WEBHOOK_LIMITS, WebhookEvent, new_uid

router = APIRouter(prefix="/webhooks", tags=["webhooks"], responses=documented(401, 403, 422, 429, 503))

URL_LENGTH = 2000
MOST_PORT = 65_535
MINUTES_PER_WEEK = 7 * 24 * 60
WebhookId = Annotated[int, Path(ge=1, le=INT32)]


def _checked_url(url: str) -> str:
    """Return a receiver's address. Raises ValueError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError("must be an address such as https://example.org/hook") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError("must begin with http:// or https:// and name a host")
    if parsed.userinfo:
        raise ValueError("must have no user name or password before the host")
    if parsed.port is not None and not 1 <= parsed.port <= MOST_PORT:
        raise ValueError(f"must have a port from 1 to {MOST_PORT}")
    return url


StalledMinutes = Annotated[float, Field(ge=1, le=MINUTES_PER_WEEK)]
RewardFall = Annotated[float, Field(gt=0, le=1e9)]
IdlePercent = Annotated[float, Field(ge=0, lt=100)]
Events = Annotated[list[WebhookEvent], Field(min_length=1, max_length=len(WEBHOOK_EVENTS))]
Url = Annotated[str, Field(min_length=1, max_length=URL_LENGTH, pattern=NO_NUL), AfterValidator(_checked_url)]


class WebhookView(View):
    """A webhook without its secret."""

    id: int
    name: str
    url: str
    form: Form
    events: list[WebhookEvent]
    stalled_minutes: float
    reward_fall: float
    idle_percent: float
    active: bool = Field(description="False: it sends nothing, because its maker is no operator any more.")
    created_at: float


class WebhookPage(View):
    """Webhooks, the newest first."""

    items: list[WebhookView]
    next_cursor: str | None


def _limit(event: WebhookEvent) -> Any:
    """Return the field of an event's limit."""
    _, default, meaning = WEBHOOK_LIMITS[event]
    return Field(default=default, description=f"{event}: {meaning}.")


class NewWebhook(Body):
    """A new webhook."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "team", "url": "https://example.org/hook", "events": ["failed", "stalled"]}]
        }
    )

    name: Name
    url: Url = Field(description="Where messages are posted to.")
    form: Form = Field(default="json", description="slack: an incoming webhook of Slack, or what takes its form.")
    events: Events = Field(description="What it is about.")
    stalled_minutes: StalledMinutes = _limit("stalled")
    reward_fall: RewardFall = _limit("reward_fell")
    idle_percent: IdlePercent = _limit("engine_idle")


class WebhookChange(Body):
    """Changes of a webhook; missing fields stay unchanged, and so does the secret."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"events": ["failed"], "stalled_minutes": 20}]})

    name: Name | None = None
    url: Url | None = None
    form: Form | None = None
    events: Events | None = None
    stalled_minutes: StalledMinutes | None = None
    reward_fall: RewardFall | None = None
    idle_percent: IdlePercent | None = None


class IssuedWebhook(WebhookView):
    """A new webhook; `secret`, which signs its messages, is shown only this once."""

    secret: str


class DeliveryView(View):
    """A message of a webhook."""

    id: int
    webhook: int
    event: str = Field(description="What it is about, or `test`.")
    run: str | None = Field(description="The run that it is about.")
    text: str
    state: State
    tries: int
    created_at: float
    next_at: float | None = Field(description="waiting: the time of the next try.")
    delivered_at: float | None
    status: int | None = Field(description="The receiver's last HTTP status.")
    error: str = Field(description="Why the last try failed.")


class DeliveryPage(View):
    """Messages, the newest first."""

    items: list[DeliveryView]
    next_cursor: str | None


@router.get("", summary="List webhooks")
def list_webhooks(
    who: auth.Operator, service: ServiceDep, limit: Limit = LARGEST_PAGE, cursor: Cursor = None
) -> WebhookPage:
    """List all webhooks, the newest first."""
    with service.database.reading() as session:
        rows, following = newest(session, Webhook, [], limit, cursor)
        active = active_ids(session, time.time())
        return WebhookPage(items=[_shown(row, row.id in active) for row in rows], next_cursor=following)


@router.post("", status_code=201, responses=documented(409), summary="Create a webhook")
def make_webhook(
    body: NewWebhook, request: Request, response: Response, who: auth.Operator, service: ServiceDep
) -> IssuedWebhook:
    """Create a webhook; its secret is only in this response. Links in messages begin with this request's host.

    Messages are signed as in Standard Webhooks: `webhook-signature` is `v1,` and the base64 of the HMAC-SHA256 of
    `{webhook-id}.{webhook-timestamp}.{body}`, whose key is the base64 after `whsec_`.
    """
    given = {**body.model_dump(), "events": list(dict.fromkeys(body.events))}
    with service.database.writing() as session:
        if session.scalars(select(func.count()).select_from(Webhook)).one() >= MOST_WEBHOOKS:
            raise ProblemError(409, f"there are {MOST_WEBHOOKS} webhooks already: delete one first")
        row = Webhook(
            **given, secret=new_secret(), service_url=str(request.base_url).rstrip("/"), maker_id=who.token_id,
            created_at=time.time(),
        )  # fmt: skip
        session.add(row)
        session.flush()
        created_at(response, f"/webhooks/{row.id}")
        return IssuedWebhook(**_shown(row, True).model_dump(), secret=row.secret)


@router.get("/deliveries", summary="Messages of webhooks")
def list_deliveries(
    who: auth.Operator,
    service: ServiceDep,
    webhook: Annotated[int | None, Query(ge=1, le=INT32, description="Only of this webhook.")] = None,
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> DeliveryPage:
    """List what was sent, waits or was given up, the newest first; it is kept for 30 days."""
    with service.database.reading() as session:
        of_one = [] if webhook is None else [WebhookDelivery.webhook_id == webhook]
        rows, following = newest(session, WebhookDelivery, of_one, limit, cursor)
        return DeliveryPage(items=[_view(row) for row in rows], next_cursor=following)


@router.get("/{webhook_id}", responses=documented(404), summary="Show a webhook")
def get_webhook(webhook_id: WebhookId, who: auth.Operator, service: ServiceDep) -> WebhookView:
    """Return a webhook without its secret."""
    with service.database.reading() as session:
        return _shown(_find(session, webhook_id), webhook_id in active_ids(session, time.time()))


@router.patch("/{webhook_id}", responses=documented(404), summary="Change a webhook")
def edit_webhook(webhook_id: WebhookId, body: WebhookChange, who: auth.Operator, service: ServiceDep) -> WebhookView:
    """Change a webhook, and be its maker from now on. Messages that wait go to its new address."""
    given = body.model_dump(exclude_none=True)
    if body.events is not None:
        given["events"] = list(dict.fromkeys(body.events))
    with service.database.writing() as session:
        row = _find(session, webhook_id)
        for name, value in given.items():
            setattr(row, name, value)
        row.maker_id = who.token_id
        return _shown(row, True)


@router.delete("/{webhook_id}", status_code=204, responses=documented(404), summary="Delete a webhook")
def delete_webhook(webhook_id: WebhookId, who: auth.Operator, service: ServiceDep) -> Response:
    """Delete a webhook with its messages; those that wait are not sent."""
    with service.database.writing() as session:
        session.delete(_find(session, webhook_id))
    return Response(status_code=204)


@router.post("/{webhook_id}/test", responses=documented(404), summary="Test a webhook")
async def test_webhook(webhook_id: WebhookId, who: auth.Operator, service: ServiceDep) -> DeliveryView:
    """Send a test message once, and return how that went; it takes at most 10 seconds."""
    row = await run_in_threadpool(_read, service, webhook_id)
    content = content_of(row, TEST, time.time(), f"This is a test of the webhook “{row.name}”")
    key = f"{TEST}_{new_uid()}"
    public_only = service.settings.webhooks_public_only
    outcome = await post(row.url, row.form, row.secret, message_id(row.id, key), content, public_only)
    return await run_in_threadpool(_noted, service, webhook_id, key, content, outcome)


def _read(service: Service, webhook_id: int) -> Webhook:
    with service.database.reading(snapshot=False) as session:
        return _find(session, webhook_id)


def _noted(service: Service, webhook_id: int, key: str, content: dict[str, object], outcome: Outcome) -> DeliveryView:
    now = time.time()
    with service.database.writing() as session:
        row = WebhookDelivery(
            webhook_id=_find(session, webhook_id).id,
            key=key,
            event=TEST,
            content=content,
            created_at=now,
            tries=1,
            next_at=None,
            delivered_at=None if outcome.error else now,
            status=outcome.status,
            error=outcome.error,
        )
        session.add(row)
        session.flush()
        return _view(row)


def _find(session: Session, webhook_id: int) -> Webhook:
    webhook = session.get(Webhook, webhook_id)
    if webhook is None:
        raise NotFoundError("webhook", webhook_id)
    return webhook


def _shown(row: Webhook, active: bool) -> WebhookView:
    stored = WebhookView.model_fields.keys() - {"active"}
    return WebhookView(**{name: getattr(row, name) for name in stored}, active=active)


def _view(row: WebhookDelivery) -> DeliveryView:
    run = row.content["run"]
    return DeliveryView(
        id=row.id,
        webhook=row.webhook_id,
        event=row.event,
        run=run["uid"] if run else None,
        text=row.content["text"],
        state=state_of(row),
        tries=row.tries,
        created_at=row.created_at,
        next_at=row.next_at,
        delivered_at=row.delivered_at,
        status=row.status,
        error=row.error,
    )
