"""Middlewares that every request passes before its route: pure ASGI, and without buffering bodies.

From the outermost to the innermost:

- `HeadAsGet`: HEAD requests
- `ForwardedClient`: the client's address behind a proxy
- `RequestMetrics`: counts every response
- `SecurityHeaders`: headers of every response
- `HostGuard`: protection against DNS rebinding and foreign pages
- `RateGuard`: requests per second
- `BodyLimit`: size and time of a body
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import anyio
from anyio.lowlevel import checkpoint
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rhyme_openrlhf.api.http.limits import BodyRoom, ComingBody, RateLimit
from rhyme_openrlhf.api.http.problems import Code, problem_response
from rhyme_openrlhf.api.http.security_headers import SECURITY_HEADERS
from rhyme_openrlhf.api.http.service_metrics import ServiceMetrics
from rhyme_openrlhf.api.settings import Network

# One year, as browsers' preload lists require; sent only over TLS.
HSTS = "max-age=31536000"
# Batches of events have a separate size limit.
BATCH_START, BATCH_END = "/api/v1/ingest/", "/batches"
# Seconds after which a client whose body was evicted sends it again; the burst is over by then.
ROOM_RETRY_SECONDS = 1
# Health probes come from machines that use other host names, and must not fail because another client sends too much.
PROBES = frozenset({"/healthz", "/readyz"})


class HeadAsGet:
    """Middleware that responds to HEAD with the status and headers of GET, without a body; a stream does not begin.

    It is the outermost middleware: all others see GET, and the server sees HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                endless = "content-length" not in Headers(raw=message["headers"])
            else:
                endless = message.get("more_body", False)
            if endless:
                # The client has its response; the body is not computed.
                answering.cancel()
                await checkpoint()

        with anyio.CancelScope() as answering:
            await self.app({**scope, "method": "GET"}, receive, send_head)


class ForwardedClient:
    """Middleware that takes the client's address and protocol from the headers of trusted proxies."""

    def __init__(self, app: ASGIApp, proxies: Sequence[Network]) -> None:
        self.app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("client") and _is_among(scope["client"][0], self._proxies):
            headers = Headers(scope=scope)
            address = client_behind(scope["client"][0], headers.getlist("x-forwarded-for"), self._proxies)
            scope = {**scope, "client": (address, 0)}
            if headers.get("x-forwarded-proto", "").strip().lower() == "https":
                scope["scheme"] = "https"
        await self.app(scope, receive, send)


def client_behind(peer: str, said: Sequence[str], proxies: Sequence[Network]) -> str:
    """Return the client's address: the last one in the X-Forwarded-For headers `said` that is no trusted proxy.

    Each proxy appends the address that it sees, so a client can forge only entries before its own address.
    """
    address = peer
    for hop in reversed(",".join(said).split(",")):
        if not _is_among(address, proxies):
            break
        found = _hop_address(hop)
        if found is None:
            break
        address = found
    return address


def _hop_address(hop: str) -> str | None:
    """Return the address of one entry in normal form, without a port; None for anything else."""
    hop = hop.strip()
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        address = ipaddress.ip_address(hop)
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)


def _is_among(address: str, networks: Sequence[Network]) -> bool:
    found = _hop_address(address)
    return found is not None and any(ipaddress.ip_address(found) in network for network in networks)


class SecurityHeaders:
    """Middleware that sets SECURITY_HEADERS on every response, and forbids caching of API responses."""

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
    """Middleware that refuses requests for other host names, and requests from foreign pages.

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

    def _problem(self, scope: Scope) -> tuple[int, str, Code] | None:
        if scope["path"] in PROBES:
            return None
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in self._names:
            return 400, "the Host header is not a name of this service: add it to --serve.allowed_hosts", "wrong_host"
        origin = headers.get("origin")
        if origin is not None and not same_origin(origin, hosts[0]):
            return 403, "requests from pages of other origins are refused", "foreign_origin"
        # Browsers that send no Origin header report a foreign page in this header.
        if scope["method"] not in ("GET", "HEAD") and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "requests from pages of other origins are refused", "foreign_origin"
        return None


def host_name(host: str) -> str:
    """Return the Host header without its port, in lower case."""
    name, colon, port = host.rpartition(":")
    if colon and port.isascii() and port.isdigit():
        host = name
    return host.lower()


def same_origin(origin: str, host: str) -> bool:
    """Return True if an Origin header names the host of the request, with any scheme because TLS may end before us."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme not in ("http", "https"):  # also refuses "null": a sandboxed or local page
        return False
    default = ":443" if parts.scheme == "https" else ":80"
    return parts.netloc.lower().removesuffix(default) == host.lower().removesuffix(default)


class RateGuard:
    """Middleware that limits the requests per second from one address; `access/auth.py` limits those per token."""

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
    """Middleware that refuses bodies larger than a limit (bytes), announced or received, and bodies that are too slow.

    All incoming bodies together take at most `room` bytes, for any number of connections.
    """

    def __init__(self, app: ASGIApp, limit: int, batch_limit: int, seconds: float, room: int) -> None:
        self.app = app
        self._limit = limit
        self._batch_limit = batch_limit
        self._seconds = seconds
        self._room = BodyRoom(room)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        is_batch = path.startswith(BATCH_START) and path.endswith(BATCH_END)
        limit = self._batch_limit if is_batch else self._limit
        too_large = f"the body is larger than {limit} bytes"
        announced = Headers(scope=scope).get("content-length", "0")
        if not (announced.isascii() and announced.isdigit()):
            await problem_response(400, "Content-Length is not a number")(scope, receive, send)
            return
        if int(announced) > limit:
            await problem_response(413, too_large)(scope, receive, send)
            return
        # The time begins with reading the body; earlier work of the route does not count.
        body: ComingBody | None = None
        complete = False

        async def receive_counted() -> Message:
            nonlocal body, complete
            if complete:
                return await receive()
            if body is None:
                body = self._room.enter(asyncio.get_running_loop().time() + self._seconds)
            message = await self._next_part(body, receive)
            size = len(message.get("body", b""))
            # Readers of the body pass this kind of error on to the error handlers.
            if body.size + size > limit:
                raise HTTPException(413, too_large)
            self._room.grow(body, size)
            if not message.get("more_body", False):
                complete = True
                self._room.leave(body)
            return message

        try:
            await self.app(scope, receive_counted, send)
        finally:
            if body is not None:
                self._room.leave(body)

    async def _next_part(self, body: ComingBody, receive: Receive) -> Message:
        """Return the body's next part. Raises HTTPException: 408 after the deadline, 503 if other bodies need the
        memory.
        """
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout_at(body.deadline) as body.waiting:
                    if not body.evicted:
                        return await receive()
            finally:
                body.waiting = None
        # The rest of the body may still arrive, and must not be parsed as the next request.
        headers = {"Connection": "close"}
        if body.evicted:
            headers["Retry-After"] = str(ROOM_RETRY_SECONDS)
            raise HTTPException(503, "too many large bodies are being received: try again", headers)
        raise HTTPException(408, f"the body did not arrive within {self._seconds:g} s (--serve.body_seconds)", headers)


class RequestMetrics:
    """Middleware that counts responses and their time by route template, so that the number of labels is small.

    `templates`: endpoint -> path template; other responses count as "none".
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
                # Observed at the start of the response, because a stream is open for hours.
                started = True
                observe(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_seen)
        finally:
            if not started:
                # An internal error: its response is sent outside of all middlewares.
                observe(500)
