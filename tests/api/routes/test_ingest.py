"""Batches over HTTP: what is refused, and what a refusal says."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from rhyme_openrlhf.api.ingest.workers import IngestionInterruptedError
from rhyme_openrlhf.api.routes.ingest import RECEIPT_BYTES
from rhyme_openrlhf.api.store.json_values import DEPTH
from rhyme_openrlhf.api.store.models import Attempt, Run

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)

URL = f"/api/v1/ingest/attempts/{'b' * 16}"
BATCHES = f"{URL}/batches"
NOTE = {"kind": "note", "time": 1.0, "source": "driver", "sequence": 0, "level": "info", "text": "x"}
# Without the clock: test processes must agree on a test's name, and pytest makes it of this.
TORN = gzip.compress(b'{"events": []}', mtime=0)[:-4]


def test_a_batch_is_taken_once_and_a_packed_one_too(api: Any) -> None:
    api.announce()
    assert api.send([NOTE]) == {"accepted": 1, "duplicates": 0, "stop": False, "next": {"driver": 1}}
    body = gzip.compress(json.dumps({"sent_at": 1.0, "dropped": {"driver": 0}, "events": [NOTE]}).encode())
    headers = {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": "gzip"}
    answer = api.reporter.post(BATCHES, content=body, headers=headers)
    assert answer.json() == {"accepted": 0, "duplicates": 1, "stop": False, "next": {"driver": 1}}
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


NO_BATCHES = [
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
    (b'{"events": [], "known": {"a": -1}}', {"Content-Type": "application/json"}, 422),
    (b'{"events": [], "known": {"a\\u0000": 1}}', {"Content-Type": "application/json"}, 422),
]


def test_what_is_no_batch_is_refused(api: Any) -> None:
    api.announce()
    # A service takes longer to make than to ask: one for all.
    for content, headers, status in NO_BATCHES:
        answer = api.reporter.post(BATCHES, content=content, headers=headers)
        assert answer.status_code == status, (content[:80], answer.text)
        assert answer.headers["content-type"] == "application/problem+json", content[:80]


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
    monkeypatch.setattr("rhyme_openrlhf.api.store.database.BUSY_SECONDS", 0.05)
    api.announce()
    api.send([])
    with api.service.database.writing():
        answer = api.reporter.post(BATCHES, json={"events": [NOTE]})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert api.send([NOTE])["accepted"] == 1


def other_reporter(api: Any, **run: str) -> TestClient:
    """Another reporter's token; `run`: the one run that it is for."""
    body = {"name": "another reporter", "role": "reporter", **run}
    secret = api.operator.post("/api/v1/tokens", json=body).json()["token"]
    return TestClient(api.app, base_url=str(api.nobody.base_url), headers={"Authorization": f"Bearer {secret}"})


def everything(api: Any) -> Any:
    """What a run shows, but for when it was heard of."""
    run = api.viewer.get(f"/api/v1/runs/{'a' * 16}").json()
    steps = api.viewer.get(f"/api/v1/export/runs/{'a' * 16}/steps", params={"format": "json"}).json()
    return [run | {"attempts": [one | {"heartbeat_at": 0} for one in run["attempts"]]}, steps]


ANNOUNCED = {"run": "a" * 16, "name": "another", "run_directory": "/elsewhere", "config": {"settings": {"x": 1}}}
NEW = f"/api/v1/ingest/attempts/{'e' * 16}"


def attempts_to_report(client: TestClient, step: dict[str, Any]) -> list[int]:
    """Statuses of all that a reporter may send: for a new attempt, and for the one that is there."""
    found = [client.put(url, json=ANNOUNCED).status_code for url in (NEW, URL)]
    for body in ({"events": []}, {"events": [step]}, {"events": [], "heartbeat": {"alive": False}}):
        found.append(client.post(BATCHES, json=body).status_code)
    return found


def test_a_run_belongs_to_the_token_that_announced_it(
    reported: Any, record: Callable[..., list[dict[str, Any]]]
) -> None:
    step = {**record()[1], "source": "elsewhere", "sequence": 0}
    before = everything(reported)
    assert before[0]["status"] == "succeeded" and len(before[1]) == 3
    other = other_reporter(reported)
    assert attempts_to_report(other, step) == [403] * 5
    said = other.put(NEW, json=ANNOUNCED).json()["detail"]
    assert said.startswith(
        "the run belongs to another token: report with that token, with an operator's token, or with a "
    )
    assert everything(reported) == before
    # The owner goes on, and an operator, and a token that an operator makes for this run.
    assert reported.reporter.post(BATCHES, json={"events": []}).status_code == 200
    assert other_reporter(reported, run="a" * 16).put(NEW, json=ANNOUNCED).status_code == 200
    assert reported.operator.post(f"{NEW}/batches", json={"events": []}).status_code == 200
    # Its own other runs do not help.
    assert other.put(f"/api/v1/ingest/attempts/{'f' * 16}", json={**ANNOUNCED, "run": "f" * 16}).status_code == 200
    assert other.post(BATCHES, json={"events": []}).status_code == 403


def test_only_its_own_token_reports_for_a_launched_run(
    reported: Any, record: Callable[..., list[dict[str, Any]]]
) -> None:
    with reported.service.database.writing() as session:
        session.execute(update(Run).values(origin="launched"))
        session.execute(update(Attempt).values(submission_id=Attempt.uid))
    step = {**record()[1], "source": "elsewhere", "sequence": 0}
    before = everything(reported)
    # Also not the token that a run belonged to.
    assert attempts_to_report(reported.reporter, step) == [403] * 5
    own = other_reporter(reported, run="a" * 16)
    assert own.put(NEW, json=ANNOUNCED).status_code == 403
    assert everything(reported) == before
    assert own.post(BATCHES, json={"events": []}).status_code == 200
    assert own.put(URL, json=ANNOUNCED).status_code == 200


@pytest.mark.parametrize(("status", "goes_on"), [("running", True), ("lost", True), ("succeeded", False)])
def test_a_run_without_an_owner_goes_on_with_its_first_attempt(api: Any, status: str, goes_on: bool) -> None:
    """Imported while it ran, or stored by a version that kept no owner."""
    api.announce()
    with api.service.database.writing() as session:
        session.execute(update(Run).values(reporter_id=None, status=status))
        session.execute(update(Attempt).values(status=status))
    other = other_reporter(api)
    assert other.put(NEW, json=ANNOUNCED).status_code == 403
    assert api.reporter.post(BATCHES, json={"events": [NOTE]}).status_code == (200 if goes_on else 403)
    # From now on it has one.
    assert other.post(BATCHES, json={"events": []}).status_code == 403
    assert api.reporter.put(NEW, json=ANNOUNCED).status_code == (200 if goes_on else 403)


def test_an_operator_removes_an_attempt(reported: Any, record: Callable[..., list[dict[str, Any]]]) -> None:
    before = everything(reported)
    run = f"/api/v1/runs/{'a' * 16}"
    assert reported.operator.delete(f"{run}/attempts/1").status_code == 409
    assert reported.operator.put(NEW, json={**ANNOUNCED, "config": {}}).status_code == 200
    assert reported.operator.post(f"{NEW}/batches", json={"events": [record()[1]]}).status_code == 200
    damaged = everything(reported)
    assert damaged[0]["status"] == "starting" and len(damaged[1]) == 1
    assert reported.reporter.delete(f"{run}/attempts/2").status_code == 403
    assert reported.operator.delete(f"{run}/attempts/3").status_code == 404
    assert reported.operator.delete(f"{run}/attempts/2").status_code == 204
    assert everything(reported) == before


# One level is the event's own. Beyond: where a reader in Python gives up, where one in C does, and far behind both.
@pytest.mark.parametrize("kind", ["from_the_future", "note"])
@pytest.mark.parametrize(
    ("levels", "status"),
    [(DEPTH - 1, 200), (DEPTH, 422), (900, 422), (980, 422), (5000, 422)],
)
def test_an_event_that_is_nested_too_deep_is_refused_and_others_can_be_read(
    api: Any, kind: str, levels: int, status: int
) -> None:
    api.announce()
    deep = "[" * (levels - 1) + "null" + "]" * (levels - 1)
    events = f'[{json.dumps(NOTE)}, {json.dumps({**NOTE, "kind": kind, "sequence": 1})[:-1]}, "x": {deep}}}]'
    headers = {"Content-Type": "application/json"}
    answer = api.reporter.post(BATCHES, content=f'{{"events": {events}}}'.encode(), headers=headers)
    assert answer.status_code == status, answer.text
    if status == 422 and levels < 1000:
        assert answer.json()["errors"][0]["field"] == "body.events[1]"
        assert f"must not be nested deeper than {DEPTH} levels" in answer.json()["errors"][0]["message"]
    shown = api.viewer.get(f"/api/v1/runs/{'a' * 16}/events")
    assert shown.status_code == 200
    assert [one["sequence"] for one in shown.json()["items"]] == ([0, 1] if status == 200 else [])
    if status == 200:
        assert json.dumps(shown.json()["items"][1]["body"]["x"]) == deep


def test_a_receipt_tells_what_comes_next_and_what_is_lost(api: Any) -> None:
    api.announce()
    engine = {**NOTE, "source": "engine-0"}
    assert api.send([NOTE, engine])["next"] == {"driver": 1, "engine-0": 1}
    assert api.send([{**NOTE, "sequence": 1}])["next"] == {"driver": 2}
    assert api.send([])["next"] == {"driver": 2, "engine-0": 1}
    body = {"events": [{**NOTE, "sequence": 9}], "known": {"driver": 9}}
    answer = api.reporter.post(BATCHES, json=body).json()
    assert answer == {"accepted": 0, "duplicates": 0, "stop": False, "next": {"driver": 2, "engine-0": 1}}
    # An answer that a reporter would not read whole names fewer writers.
    many = [{**NOTE, "source": f"engine-{number:050d}"} for number in range(1500)]
    assert len(api.send(many)["next"]) < 1500
    answer = api.reporter.post(BATCHES, json={"events": []})
    assert 50_000 < len(answer.content) < RECEIPT_BYTES + 1000
    # What is lost comes first.
    answer = api.reporter.post(BATCHES, json={"events": [], "known": {"trainer": 5}}).json()
    assert answer["next"]["trainer"] == 0


def test_a_batch_whose_ingestion_was_interrupted_is_asked_for_again(api: Any) -> None:
    async def interrupted(sent: Any) -> Any:
        raise IngestionInterruptedError("the ingestion was interrupted: send the batch again")

    api.announce()
    api.service.intake = interrupted
    answer = api.reporter.post(f"/api/v1/ingest/attempts/{'b' * 16}/batches", json={"events": []})
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "2"
    assert answer.json()["detail"] == "the ingestion was interrupted: send the batch again"
