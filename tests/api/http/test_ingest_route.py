"""Batches over HTTP: what is refused, and what a refusal says."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)

URL = f"/api/v1/ingest/attempts/{'b' * 16}"
BATCHES = f"{URL}/batches"
NOTE = {"kind": "note", "time": 1.0, "source": "driver", "sequence": 0, "level": "info", "text": "x"}
# Without the clock: test processes must agree on a test's name, and pytest makes it of this.
TORN = gzip.compress(b'{"events": []}', mtime=0)[:-4]


def test_a_batch_is_taken_once_and_a_packed_one_too(api: Any) -> None:
    api.announce()
    assert api.send([NOTE]) == {"accepted": 1, "duplicates": 0, "stop": False}
    body = gzip.compress(json.dumps({"sent_at": 1.0, "dropped": {"driver": 0}, "events": [NOTE]}).encode())
    headers = {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": "gzip"}
    answer = api.reporter.post(BATCHES, content=body, headers=headers)
    assert answer.json() == {"accepted": 0, "duplicates": 1, "stop": False}
    text = api.viewer.get("/metrics").text
    assert "rhyme:ingest_events_total 1.0" in text and "rhyme:ingest_duplicates_total 1.0" in text


def test_what_the_reporter_gave_up_is_counted(api: Any) -> None:
    api.announce()
    answer = api.reporter.post(BATCHES, json={"events": [NOTE], "dropped": {"driver": 7}})
    assert answer.status_code == 200
    assert api.viewer.get(f"/api/v1/runs/{'a' * 16}").json()["dropped_events"] == 7


def test_an_unknown_attempt_is_a_conflict(api: Any) -> None:
    assert api.reporter.post(BATCHES, json={"events": []}).status_code == 409


def test_an_attempt_belongs_to_one_run(api: Any) -> None:
    api.announce()
    api.announce()
    body = {"run": "c" * 16, "name": "n", "run_directory": "", "config": {}}
    assert api.reporter.put(URL, json=body).status_code == 409


def test_a_bad_event_is_named_by_its_position_and_nothing_is_stored(api: Any) -> None:
    api.announce()
    answer = api.reporter.post(BATCHES, json={"events": [NOTE, {**NOTE, "sequence": 1, "level": "loud"}]})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "body.events[1]"
    assert api.send([NOTE])["accepted"] == 1


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{}", {}, 415),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b'{"events": []}', {"Content-Type": "application/json", "Content-Encoding": "br"}, 415),
        (b'{"events": []}', {"Content-Type": "application/json", "Content-Encoding": "gzip"}, 422),
        (TORN, {"Content-Type": "application/json", "Content-Encoding": "gzip"}, 422),
        (b"{}", {"Content-Type": "application/json"}, 422),
        (b"", {"Content-Type": "application/json"}, 422),
        (b"\xff\xfe", {"Content-Type": "application/json"}, 422),
        (b'{"events": 3}', {"Content-Type": "application/json"}, 422),
        (b'{"events": [3]}', {"Content-Type": "application/json"}, 422),
        (b'{"events": [], "dropped": {"a": -1}}', {"Content-Type": "application/json"}, 422),
        (b'{"events": [], "dropped": {"a\\u0000": 1}}', {"Content-Type": "application/json"}, 422),
        (b'{"events": [], "dropped": {"a": 99999999999}}', {"Content-Type": "application/json"}, 422),
        (b'{"events": [], "heartbeat": {"alive": 3}}', {"Content-Type": "application/json"}, 422),
        (b'{"events": ' + b"[" * 5000 + b"]" * 5000 + b"}", {"Content-Type": "application/json"}, 422),
        (b'{"events": [{"kind": "note", "time": 1e999}]}', {"Content-Type": "application/json"}, 422),
    ],
)
def test_what_is_no_batch_is_refused(api: Any, content: bytes, headers: dict[str, str], status: int) -> None:
    api.announce()
    answer = api.reporter.post(BATCHES, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "config",
    [
        '{"a": NaN}',
        '{"a": "\\u0000"}',
        '{"a\\u0000": 1}',
        '{"a": "\\ud800"}',
        '{"\\ud800": 1}',
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '{"a": ' + "[" * 90_000 + "]" * 90_000 + "}",
        '{"command": "rm"}',
        '{"versions": 3}',
    ],
)
def test_a_configuration_that_cannot_be_kept_is_refused(api: Any, config: str) -> None:
    body = f'{{"run": "{"a" * 16}", "name": "n", "run_directory": "", "config": {config}}}'
    answer = api.reporter.put(URL, content=body.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_too_many_batches_at_once_are_told_to_come_again(make_api: Any) -> None:
    api = make_api(batches_in_flight=1)
    api.announce()
    with api.service.limits.batches.one():
        answer = api.reporter.post(BATCHES, json={"events": [NOTE]})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert api.send([NOTE])["accepted"] == 1


def test_a_locked_store_is_an_answer_not_a_wait(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not api.service.database.is_sqlite:
        pytest.skip("PostgreSQL locks rows, not the store")
    monkeypatch.setattr("rhyme_openrlhf.api.database.BUSY_SECONDS", 0.05)
    api.announce()
    api.send([])
    with api.service.database.writing():
        answer = api.reporter.post(BATCHES, json={"events": [NOTE]})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert api.send([NOTE])["accepted"] == 1
