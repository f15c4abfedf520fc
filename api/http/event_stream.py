"""Responses with server-sent events: counted, kept alive, and closed when the client stops reading."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import anyio
from prometheus_client import Gauge
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from rhyme_openrlhf.api.http.limits import SLOT_RETRY_S, SharedSlots
from rhyme_openrlhf.api.http.problems import FieldError, ProblemError, problem_response, retry_later
from rhyme_openrlhf.api.live.streams import Message
from rhyme_openrlhf.api.store.bounds import INT64

# Most proxies close a connection without traffic after a minute.
PING_SECONDS = 15
# A client that reads nothing for this long is disconnected.
SEND_SECONDS = 30.0


def documented_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of an operation that streams; `description`: of what it sends."""
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": f"Server-sent events: {description}", "content": content}}


class LiveResponse(EventSourceResponse):
    """A counted stream of one holder; responds 503 when too many are open.

    It ends when another holder, who has fewer streams, needs its place.
    """

    def __init__(self, slots: SharedSlots, holder: str, opened: Gauge, messages: AsyncGenerator[Message]) -> None:
        super().__init__(_events(messages), ping=PING_SECONDS, send_timeout=SEND_SECONDS)
        self._slots = slots
        self._holder = holder
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_seen(message: AsgiMessage) -> None:
            nonlocal started
            started = True
            await send(message)

        with anyio.CancelScope() as open_time:
            try:
                place = self._slots.acquire(self._holder, open_time.cancel)
            except ProblemError as error:
                await _refusal(error)(scope, receive, send)
                return
            self._opened.inc()
            try:
                await super().__call__(scope, receive, send_seen)
            finally:
                self._opened.dec()
                self._slots.release(place)
        if open_time.cancelled_caught and started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif open_time.cancelled_caught:
            await _refusal(retry_later(503, "another client needed this stream", SLOT_RETRY_S))(scope, receive, send)


def _refusal(error: ProblemError) -> JSONResponse:
    return problem_response(error.status, error.detail, error.code, headers=error.headers)


async def _events(messages: AsyncGenerator[Message]) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(messages):
        async for one in messages:
            yield ServerSentEvent(id=one.id, data=one.data, event=one.event)


def last_id(header: str | None, after: int | None) -> int | None:
    """Return the id behind which a stream begins: Last-Event-ID, else `after`, else None. Raises ProblemError (422)."""
    if header is None or header == "":
        return after
    if not (header.isascii() and header.isdigit() and int(header[:20]) <= INT64 and len(header) < 20):
        problem = FieldError(field="header.Last-Event-ID", message="is not an id of this stream")
        raise ProblemError(422, "the request is not valid", errors=[problem])
    return int(header)
