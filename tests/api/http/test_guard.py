"""Refusals before any route (host, origin, size, rate), and the headers of every response."""

from __future__ import annotations

import gzip
import ipaddress
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.http.guard import client_behind, host_name, same_origin
from rhyme_openrlhf.api.http.limits import BodyRoom, RateLimit, Slots
from rhyme_openrlhf.api.http.problems import ProblemError
from rhyme_openrlhf.api.settings import ServeSettings

RUNS = "/api/v1/runs"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost:8420@evil.example", "", "[::1]x"]
)
def test_a_foreign_host_is_refused(api: Any, host: str) -> None:
    answer = api.viewer.get(RUNS, headers={"Host": host})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8420", "localhost:1", "LOCALHOST", "[::1]:8420"])
def test_our_own_names_are_taken(api: Any, host: str) -> None:
    assert api.viewer.get(RUNS, headers={"Host": host}).status_code == 200


def test_further_names_can_be_allowed(make_api: Any) -> None:
    api = make_api(allowed_hosts="rhyme.example, other.example")
    assert api.viewer.get(RUNS, headers={"Host": "rhyme.example"}).status_code == 200
    assert api.viewer.get(RUNS, headers={"Host": "third.example"}).status_code == 400


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8420", 200),
        ("https://127.0.0.1:8420", 200),
        ("http://127.0.0.1:8421", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("file://", 403),
    ],
)
def test_pages_of_other_origins_are_refused(api: Any, origin: str, status: int) -> None:
    assert api.viewer.get(RUNS, headers={"Origin": origin}).status_code == status
    signing_in = api.nobody.post("/api/v1/session", json={"token": api.tokens["viewer"]}, headers={"Origin": origin})
    assert signing_in.status_code == status


def test_a_form_from_elsewhere_without_an_origin_is_refused(api: Any) -> None:
    headers = {"Sec-Fetch-Site": "cross-site"}
    assert api.nobody.post("/api/v1/session", json={"token": "x"}, headers=headers).status_code == 403


@pytest.mark.parametrize("path", [RUNS, "/healthz", "/nothing", "/api/v1/openapi.json"])
def test_every_answer_has_the_security_headers(api: Any, path: str) -> None:
    headers = api.viewer.get(path).headers
    policy = headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    if path.startswith("/api/"):
        assert headers["cache-control"] == "no-store"


def test_a_large_body_is_refused_announced_or_not(make_api: Any) -> None:
    api = make_api(body_mb=0.01)
    body = json.dumps({"name": "x", "description": "y" * 20_000}).encode()
    kind = {"Content-Type": "application/json"}

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    for content in (body, chunks()):
        answer = api.operator.post("/api/v1/experiments", content=content, headers=kind)
        assert answer.status_code == 413, answer.text
        assert answer.headers["content-type"] == "application/problem+json"


def test_batches_have_a_limit_of_their_own_packed_and_unpacked(make_api: Any) -> None:
    api = make_api(body_mb=0.01, batch_mb=0.1)
    api.announce()
    url = f"/api/v1/ingest/attempts/{'b' * 16}/batches"
    kind = {"Content-Type": "application/json"}
    padding = {"events": [], "padding": "x" * 50_000}
    assert api.reporter.post(url, json=padding).status_code == 200
    assert api.reporter.post(url, json={"events": [], "padding": "x" * 200_000}).status_code == 413
    bomb = gzip.compress(json.dumps({"events": [], "padding": "x" * 1_000_000}).encode())
    assert len(bomb) < 10_000
    assert api.reporter.post(url, content=bomb, headers={**kind, "Content-Encoding": "gzip"}).status_code == 413


def test_a_length_that_is_no_number_is_refused(api: Any) -> None:
    assert api.operator.post("/api/v1/experiments", headers={"Content-Length": "-5"}).status_code == 400


def test_who_is_too_fast_is_told_when_to_come_again(make_api: Any) -> None:
    api = make_api(requests_per_second=0.1, request_burst=5)
    answers = [api.viewer.get(RUNS) for _ in range(8)]
    assert [a.status_code for a in answers[:5]] == [200] * 5
    assert answers[-1].status_code == 429
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 10
    assert answers[-1].headers["content-security-policy"]
    assert api.nobody.get("/healthz").status_code == 200


PROXIES = ServeSettings(trusted_proxies="10.0.0.0/24, fd00::/8").proxies()


@pytest.mark.parametrize(
    ("peer", "said", "client"),
    [
        ("10.0.0.7", [], "10.0.0.7"),
        ("10.0.0.7", ["9.9.9.9"], "9.9.9.9"),
        # A client's own entries stand before what the proxy adds.
        ("10.0.0.7", ["1.2.3.4, 9.9.9.9"], "9.9.9.9"),
        ("10.0.0.7", ["1.2.3.4", "9.9.9.9"], "9.9.9.9"),
        ("10.0.0.7", ["1.2.3.4, 9.9.9.9, 10.0.0.8, fd00::1"], "9.9.9.9"),
        ("9.9.9.9", ["1.2.3.4"], "9.9.9.9"),
        ("10.0.0.7", ["10.0.0.9"], "10.0.0.9"),
        ("10.0.0.7", ["1.2.3.4, unknown"], "10.0.0.7"),
        ("10.0.0.7", ["1.2.3.4, "], "10.0.0.7"),
        ("10.0.0.7", ["9.9.9.9:4711"], "9.9.9.9"),
        ("10.0.0.7", ["[2001:DB8::1]:4711"], "2001:db8::1"),
        ("::ffff:10.0.0.7", ["::ffff:9.9.9.9"], "9.9.9.9"),
        ("testclient", ["1.2.3.4"], "testclient"),
    ],
)
def test_only_what_a_trusted_proxy_saw_is_a_client_s_address(peer: str, said: list[str], client: str) -> None:
    assert client_behind(peer, said, PROXIES) == client


@given(st.text(max_size=60))
def test_odd_forwarded_addresses_are_no_error(said: str) -> None:
    ipaddress.ip_address(client_behind("10.0.0.7", [said], PROXIES))


def test_behind_a_proxy_each_client_has_a_rate_of_its_own(make_api: Any) -> None:
    api = make_api(requests_per_second=0.1, request_burst=3, sign_ins_per_minute=1, trusted_proxies="10.0.0.7")
    proxy = TestClient(api.app, base_url="http://127.0.0.1:8420", client=("10.0.0.7", 1))

    def statuses(forwarded: str) -> list[int]:
        headers = {"X-Forwarded-For": forwarded, "Authorization": "Bearer wrong"}
        return [proxy.get(RUNS, headers=headers).status_code for _ in range(4)]

    for client in ("9.9.9.1", "1.2.3.4, 9.9.9.2"):
        assert statuses(client) == [401, 429, 429, 429]
    # What a client writes itself makes it nobody else.
    assert statuses("8.8.8.8, 9.9.9.2") == [429] * 4
    assert proxy.get(RUNS, headers={"X-Forwarded-For": "9.9.9.1"}).json()["detail"].endswith("from this address")


def get_paths(app: Any) -> list[str]:
    values = {"{uid}": "a" * 16, "{number}": "1", "{step}": "1", "{table}": "steps", "{name:path}": "x.log"}
    paths = [route.path for route in app.routes if isinstance(route, APIRoute) and "GET" in route.methods]
    for name, value in values.items():
        paths = [path.replace(name, value) for path in paths]
    return paths


def test_head_answers_as_get_does_without_a_body(reported: Any) -> None:
    streams = [path for path in get_paths(reported.app) if "stream" in path or "live" in path]
    for path in get_paths(reported.app):
        head = reported.operator.head(path)
        assert head.content == b"" and head.headers["content-security-policy"], path
        if path in streams:
            continue
        got = reported.operator.get(path)
        assert head.status_code == got.status_code, path
        for name in ("content-type", "content-length", "cache-control"):
            # Metrics count the request before.
            if (name, path) != ("content-length", "/metrics"):
                assert head.headers.get(name) == got.headers.get(name), (path, name)
    assert reported.nobody.head(RUNS).status_code == 401
    assert reported.operator.head("/api/v1/specs/validate").status_code == 405


def test_head_begins_no_stream(reported: Any) -> None:
    for path in (f"/api/v1/runs/{'a' * 16}/events/stream", "/api/v1/live/runs"):
        head = reported.viewer.head(path)
        assert head.status_code == 200 and head.headers["content-type"].startswith("text/event-stream")
        assert head.content == b""
    assert reported.service.limits.streams.taken == 0
    assert "rhyme:streams_open 0.0" in reported.viewer.get("/metrics").text


def test_an_announcement_has_the_limit_of_all_but_batches(make_api: Any) -> None:
    api = make_api(body_mb=0.01)
    body = {"run": "a" * 16, "name": "n", "run_directory": "", "config": {"x": "y" * 20_000}}
    assert api.reporter.put(f"/api/v1/ingest/attempts/{'b' * 16}", json=body).status_code == 413


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=60))
def test_coming_bodies_never_have_more_than_their_room(parts: list[tuple[int, int]]) -> None:
    room = BodyRoom(100)
    bodies = {number: room.enter(0.0) for number in range(6)}
    for number, size in parts:
        if not bodies[number].evicted:
            room.grow(bodies[number], size)
        assert room.size == sum(body.size for body in bodies.values() if not body.evicted) <= 100
    for body in bodies.values():
        room.leave(body)
    assert room.size == 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    rate=st.floats(0.1, 50),
    burst=st.integers(1, 20),
    waits=st.lists(st.floats(0, 3), min_size=1, max_size=60),
)
def test_a_bucket_never_lets_more_through_than_it_says(rate: float, burst: int, waits: list[float]) -> None:
    clock = Clock()
    limit = RateLimit(rate, burst, clock=clock)
    passed = 0
    for wait in waits:
        clock.now += wait
        before = limit.wait("a")
        got = limit.take("a")
        assert got == before
        passed += got == 0.0
        assert passed <= burst + rate * clock.now + 1e-6
        if got:
            # Who waits as long as told gets through.
            clock.now += got + 1e-6
            assert limit.take("a") == 0.0
            passed += 1


def test_buckets_are_forgotten_before_they_fill_the_memory() -> None:
    limit = RateLimit(1, 1, capacity=100)
    for i in range(1000):
        limit.take(f"address {i}")
    assert len(limit) == 100


def test_slots_are_given_back_also_after_an_error() -> None:
    slots = Slots(1, "things")
    with pytest.raises(ZeroDivisionError), slots.one():
        with pytest.raises(ProblemError) as refused:
            slots.acquire()
        assert refused.value.status == 503 and refused.value.headers["Retry-After"] == "1"
        _ = 1 / 0
    with slots.one():
        assert slots.taken == 1


@given(st.text(max_size=30), st.text(max_size=30))
def test_odd_hosts_and_origins_are_no_error(origin: str, host: str) -> None:
    assert same_origin(origin, host) in (True, False)
    assert isinstance(host_name(host), str)
