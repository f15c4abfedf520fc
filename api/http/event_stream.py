"""Server-sent events as an answer: counted, kept alive, and let go when nobody reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from prometheus_client import Gauge
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from rhyme_openrlhf.api.http.limits import Slots
from rhyme_openrlhf.api.http.problems import FieldError, ProblemError, problem_response
from rhyme_openrlhf.api.live.streams import Message
from rhyme_openrlhf.api.store.bounds import INT64

# Proxies close connections on which nothing comes, most of them after a minute.
PING_SECONDS = 15
# A client that reads nothing for so long is let go.
SEND_SECONDS = 30.0


class LiveResponse(EventSourceResponse):
    """A counted stream; 503 when there are too many."""

    def __init__(self, slots: Slots, opened: Gauge, messages: AsyncGenerator[Message]) -> None:
        super().__init__(_events(messages), ping=PING_SECONDS, send_timeout=SEND_SECONDS)
        self._slots = slots
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._slots.acquire()
        except ProblemError as error:
            await problem_response(error.status, error.detail, headers=error.headers)(scope, receive, send)
            return
        self._opened.inc()
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._opened.dec()
            self._slots.release()


async def _events(messages: AsyncGenerator[Message]) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(messages):
        async for one in messages:
            yield ServerSentEvent(id=one.id, data=one.data, event=one.event)


def last_id(header: str | None, after: int | None) -> int | None:
    """Where a stream begins: behind Last-Event-ID, else `after`, else None. Raises ProblemError (422)."""
    if header is None or header == "":
        return after
    if not (header.isascii() and header.isdigit() and int(header[:20]) <= INT64 and len(header) < 20):
        problem = FieldError(field="header.Last-Event-ID", message="is no id of this stream")
        raise ProblemError(422, "the request does not have its form", errors=[problem])
    return int(header)
