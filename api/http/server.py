"""The HTTP server: uvicorn with a time limit for a request's headers, which uvicorn itself does not have."""

from __future__ import annotations

import time
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import uvicorn

# Seconds for the headers; a slow network needs less. uvicorn itself closes idle kept-alive connections after five.
HEADER_SECONDS = 10.0
# uvicorn ticks ten times a second; this check runs once a second.
_TICKS = 10


class _Connection(Protocol):
    """Common interface of uvicorn's protocol classes for HTTP/1.1 (h11 and httptools)."""

    # The current or last request, None before the first one has all of its headers.
    cycle: Any


class Server(uvicorn.Server):
    """A uvicorn server that closes connections whose request headers do not arrive in time.

    After a response, the rest of an unread body has the same time limit.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # For each connection without an active request: since when, and its last request.
        self._waiting: WeakKeyDictionary[object, tuple[float, object]] = WeakKeyDictionary()

    async def on_tick(self, counter: int) -> bool:
        """Check all connections once a second."""
        if counter % _TICKS == 0:
            self._close_slow(time.monotonic())
        return await super().on_tick(counter)

    def _close_slow(self, now: float) -> None:
        for connection in list(self.server_state.connections):
            request = cast(_Connection, connection).cycle
            if request is not None and not request.response_complete:
                continue
            since, before = self._waiting.get(connection, (now, request))
            if before is not request:
                since = now
            self._waiting[connection] = since, request
            if now - since > HEADER_SECONDS:
                connection.transport.close()
