"""Clients that send slowly or not at all, over real sockets: they keep nobody else out."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from rhyme_openrlhf.api.http import server as server_module
from rhyme_openrlhf.api.http.limits import BodyRoom, ComingBody
from rhyme_openrlhf.api.http.server import Server

pytestmark = pytest.mark.usefixtures("starts_listener")

BATCHES = f"/api/v1/ingest/attempts/{'b' * 16}/batches"
# Longest wait for anything that must happen; far more than it takes.
LIMIT_SECONDS = 30.0


@contextlib.contextmanager
def served(api: Any, http: str = "auto") -> Iterator[int]:
    """Serve from a thread; gives the port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        # The test client has run the lifespan.
        config = uvicorn.Config(
            api.app, log_level="warning", ws="none", lifespan="off", http=http, timeout_graceful_shutdown=1
        )
        server = Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        end = time.monotonic() + LIMIT_SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the service is not up"
            time.sleep(0.02)
        yield bound.getsockname()[1]
        server.should_exit = True
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


def stuck(port: int, token: str, sent: bytes = b"", announced: int = 10_000, path: str = BATCHES) -> socket.socket:
    """A request whose body does not come whole: a batch, or one to another path."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS)
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"Authorization: Bearer {token}",
        "Content-Type: application/json",
        f"Content-Length: {announced}",
    ]
    connection.sendall("\r\n".join([*head, "", ""]).encode() + sent)
    return connection


def answer_of(connection: socket.socket) -> str:
    """All that comes until the other side closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_stuck_bodies_hold_no_slot_and_are_ended(make_api: Any, http: str) -> None:
    if http == "httptools":
        pytest.importorskip("httptools")
    api = make_api(batches_in_flight=2, body_seconds=1.5)
    api.announce()
    with served(api, http) as port, contextlib.ExitStack() as stack:
        open_ones = [stack.enter_context(stuck(port, api.tokens["reporter"], b"{")) for _ in range(20)]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_SECONDS) as client:
            headers = {"Authorization": f"Bearer {api.tokens['reporter']}"}
            for _ in range(5):
                assert client.post(BATCHES, json={"events": []}, headers=headers).status_code == 200
        for connection in open_ones:
            said = answer_of(connection)
            assert said.startswith("HTTP/1.1 408 ") and "within 1.5 s (--serve.body_seconds)" in said
    assert api.service.limits.batches.taken == 0


def test_a_client_that_hangs_up_is_no_fault_of_the_service(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    api.announce()
    with served(api) as port:
        for path in (BATCHES, "/api/v1/experiments", "/api/v1/session"):
            with stuck(port, api.tokens["reporter" if path is BATCHES else "operator"], b"{", path=path):
                time.sleep(0.05)
        end = time.monotonic() + LIMIT_SECONDS
        while 'method="POST"' not in (text := api.viewer.get("/metrics").text) or text.count('method="POST"') < 3:
            assert time.monotonic() < end, text
            time.sleep(0.02)
    assert 'status="5' not in text
    assert [one.getMessage() for one in caplog.records if one.levelname in ("ERROR", "CRITICAL")] == []


def test_a_body_that_drips_has_no_longer(make_api: Any) -> None:
    api = make_api(body_seconds=0.5)
    with served(api) as port, stuck(port, api.tokens["reporter"]) as connection:
        connection.settimeout(0.05)
        end = time.monotonic() + LIMIT_SECONDS
        said = ""
        while not said:
            assert time.monotonic() < end
            with contextlib.suppress(TimeoutError):
                connection.sendall(b" ")
                said = connection.recv(100).decode()
        assert said.startswith("HTTP/1.1 408 ")


def test_large_stuck_bodies_make_room_for_others(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, grow = threading.Event(), BodyRoom.grow

    def growing(room: BodyRoom, body: ComingBody, size: int) -> None:
        grow(room, body, size)
        if room.size >= 800_000:
            arrived.set()

    monkeypatch.setattr(BodyRoom, "grow", growing)
    api = make_api(batches_in_flight=1, batch_mb=1.0, body_seconds=LIMIT_SECONDS)
    api.announce()
    with served(api) as port, stuck(port, api.tokens["reporter"], b" " * 800_000, 1_000_000) as connection:
        # The honest batch is as large: both do not fit.
        body = json.dumps({"events": [], "padding": "x" * 800_000})
        headers = {"Authorization": f"Bearer {api.tokens['reporter']}", "Content-Type": "application/json"}
        assert arrived.wait(LIMIT_SECONDS)
        answer = httpx.post(f"http://127.0.0.1:{port}{BATCHES}", content=body, headers=headers, timeout=LIMIT_SECONDS)
        assert answer.status_code == 200
        said = answer_of(connection)
        assert said.startswith("HTTP/1.1 503 ") and "retry-after: 1" in said.lower()


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_headers_that_do_not_come_end_the_connection(api: Any, http: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if http == "httptools":
        pytest.importorskip("httptools")
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.25)
    monkeypatch.setattr(server_module, "_TICKS", 1)
    # Nothing; a part of a request; and after an answer, the body that nobody read.
    beginnings = [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-",
        b"GET /healthz HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
    ]
    with served(api, http) as port, contextlib.ExitStack() as stack:
        connections = []
        for beginning in beginnings:
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_SECONDS)))
            connections[-1].sendall(beginning)
        said = [answer_of(connection) for connection in connections]
        assert said[:2] == ["", ""] and said[2].startswith("HTTP/1.1 ")
        # A stream has no request to wait for.
        headers = {"Authorization": f"Bearer {api.tokens['viewer']}"}
        url = f"http://127.0.0.1:{port}/api/v1/live/runs"
        # Its own headers may be late on a busy machine.
        monkeypatch.setattr(server_module, "HEADER_SECONDS", LIMIT_SECONDS)
        with httpx.stream("GET", url, headers=headers, timeout=LIMIT_SECONDS) as answer:
            assert answer.status_code == 200
            monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.25)
            time.sleep(1.0)
            assert not answer.is_closed and api.service.limits.streams.taken == 1
