"""What every request passes before any route sees it: pure ASGI, no body is buffered here.

Outermost first: `SecurityHeaders` on every answer; `HostGuard` against DNS rebinding and foreign pages; `RateGuard`;
`BodyLimit`, which also counts a chunked body while it is read. `RequestMetrics` sees every answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rhyme_openrlhf.api.limits import RateLimit
from rhyme_openrlhf.api.problems import problem_response
from rhyme_openrlhf.api.security_headers import SECURITY_HEADERS
from rhyme_openrlhf.api.service_metrics import ServiceMetrics

# A year, as browsers' preload lists want it; only said over TLS.
HSTS = "max-age=31536000"
# Batches of events have a limit of their own.
BATCH_PATH = "/api/v1/ingest/"
# Probes come from machines that know no name of ours, and must not fail because somebody else is too fast.
PROBES = frozenset({"/healthz", "/readyz"})


class SecurityHeaders:
    """Sets SECURITY_HEADERS on every answer; what the API says is never kept by a cache."""

    def __init__(self, app: ASGIApp, tls: bool) -> None:
        self.app = app
        self._tls = tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                if self._tls:
                    headers["Strict-Transport-Security"] = HSTS
                if scope["path"].startswith("/api/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, send_with_headers)


class HostGuard:
    """Refuses requests for a host that is not us, and requests that a foreign page makes.

    `names`: host names without port, in lower case.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self.app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            await problem_response(*problem)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        if scope["path"] in PROBES:
            return None
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in self._names:
            return 400, "the Host header is not a name of this service (--serve.allowed_hosts)"
        origin = headers.get("origin")
        if origin is not None and not same_origin(origin, hosts[0]):
            return 403, "requests from pages of other origins are refused"
        # Browsers that send no Origin with a form or link from elsewhere say so here.
        if scope["method"] not in ("GET", "HEAD") and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "requests from pages of other origins are refused"
        return None


def host_name(host: str) -> str:
    """The Host header without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        host = name
    return host.lower()


def same_origin(origin: str, host: str) -> bool:
    """Whether an Origin header names the host that the request went to (any scheme: TLS may end before us)."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme not in ("http", "https"):  # also "null": a sandboxed or local page
        return False
    default = ":443" if parts.scheme == "https" else ":80"
    return parts.netloc.lower().removesuffix(default) == host.lower().removesuffix(default)


class RateGuard:
    """So many requests a second from one address; what a token may do beyond that is counted in `auth.py`."""

    def __init__(self, app: ASGIApp, limit: RateLimit) -> None:
        self.app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            address = scope["client"][0] if scope.get("client") else "unknown"
            if wait := self._limit.take(f"address {address}"):
                retry = {"Retry-After": str(max(1, -int(-wait // 1)))}
                response = problem_response(429, "too many requests from this address", headers=retry)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a limit (bytes): by what they announce, and by what comes."""

    def __init__(self, app: ASGIApp, limit: int, batch_limit: int) -> None:
        self.app = app
        self._limit = limit
        self._batch_limit = batch_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self._batch_limit if scope["path"].startswith(BATCH_PATH) else self._limit
        too_large = f"the body is larger than {limit} bytes"
        announced = Headers(scope=scope).get("content-length", "0")
        if not (announced.isascii() and announced.isdigit()):
            await problem_response(400, "Content-Length is not a number")(scope, receive, send)
            return
        if int(announced) > limit:
            await problem_response(413, too_large)(scope, receive, send)
            return
        got = 0

        async def receive_counted() -> Message:
            nonlocal got
            message = await receive()
            if message["type"] == "http.request":
                got += len(message.get("body", b""))
                if got > limit:
                    # Whoever reads the body lets this kind through to the error handlers.
                    raise HTTPException(413, too_large)
            return message

        await self.app(scope, receive_counted, send)


class RequestMetrics:
    """Counts answers and their time by route (the template, so that the names are few).

    `templates`: endpoint -> path template; an answer of anything else is counted as "none".
    """

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics, templates: Mapping[Any, str]) -> None:
        self.app = app
        self._metrics = metrics
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        started = False

        def observe(status: int) -> None:
            route = self._templates.get(scope.get("endpoint"), "none")
            self._metrics.observe_request(scope["method"], route, status, time.perf_counter() - began)

        async def send_seen(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                # Observed at the answer's start: a stream is open for hours.
                started = True
                observe(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_seen)
        finally:
            if not started:
                # A defect: its answer is given outside of all middlewares.
                observe(500)
