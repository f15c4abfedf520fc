"""The HTTP server under the app: uvicorn, which waits for a request's headers without end, with a limit for that."""

from __future__ import annotations

import time
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import uvicorn

# A connection that is kept open between two requests has five seconds (uvicorn's own limit); a slow network needs less.
HEADER_SECONDS = 10.0
# uvicorn looks around ten times a second; once is enough here.
_TICKS = 10


class _Connection(Protocol):
    """What uvicorn's protocol classes for HTTP/1.1 (h11 and httptools) have in common."""

    # The request under way or the last one; None before the first one has all of its headers.
    cycle: Any


class Server(uvicorn.Server):
    """A uvicorn server that closes connections on which the headers of a request do not come in time.

    After an answer, the rest of a body that nobody read has the same time.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # Since when a connection is seen without a request under way, and the last request that it had.
        self._waiting: WeakKeyDictionary[object, tuple[float, object]] = WeakKeyDictionary()

    async def on_tick(self, counter: int) -> bool:
        """Look at all connections, once a second."""
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
