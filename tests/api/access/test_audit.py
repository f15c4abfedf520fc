"""The audit log, and tokens that expire."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import update

pytest.importorskip("fastapi")

from rhyme_openrlhf.api.store.database import BusyError
from rhyme_openrlhf.api.store.models import BrowserSession, Token
from tests.api.http_service import Api

RUN = "a" * 16
stores = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)


def entries(api: Api, **asked: Any) -> list[dict[str, Any]]:
    answer = api.operator.get("/api/v1/audit", params=asked)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


@stores
def test_what_operators_do_is_in_the_log_with_who_and_where(api: Api, record: Callable[..., Any]) -> None:
    api.announce()
    api.send(record())
    assert entries(api) == []  # a reporter's reports are not
    made = api.operator.post("/api/v1/tokens", json={"name": "grafana", "role": "viewer"}).json()
    api.operator.post("/api/v1/experiments", json={"name": "ablation"})
    api.operator.patch(f"/api/v1/runs/{RUN}", json={"notes": "kept"})
    api.operator.post(f"/api/v1/runs/{RUN}/archive")
    api.operator.delete(f"/api/v1/runs/{RUN}")
    api.operator.delete(f"/api/v1/tokens/{made['id']}")
    found = entries(api)
    assert [(one["action"], one["target"]) for one in reversed(found)] == [
        ("Create a token", f"/tokens/{made['id']}"),
        ("Create an experiment", "/experiments/1"),
        ("Describe a run", f"/runs/{RUN}"),
        ("Archive a run", f"/runs/{RUN}/archive"),
        ("Delete a run", f"/runs/{RUN}"),
        ("Revoke a token", f"/tokens/{made['id']}"),
    ]
    assert {(one["name"], one["address"], one["browser"]) for one in found} == {("the operator", "testclient", False)}
    assert [one["action"] for one in entries(api, text="DELETE")] == ["Delete a run"]
    assert entries(api, name="grafana") == [] and len(entries(api, name="the operator")) == 6
    first = api.operator.get("/api/v1/audit", params={"limit": 4}).json()
    rest = api.operator.get("/api/v1/audit", params={"limit": 4, "cursor": first["next_cursor"]}).json()
    assert first["items"] + rest["items"] == found and rest["next_cursor"] is None


def test_what_was_refused_or_only_read_is_not_in_the_log(api: Api) -> None:
    assert api.viewer.delete(f"/api/v1/runs/{RUN}").status_code == 403
    assert api.operator.delete(f"/api/v1/runs/{RUN}").status_code == 404
    assert api.operator.post("/api/v1/tokens", json={"name": "x", "role": "king"}).status_code == 422
    assert api.operator.get("/api/v1/tokens").status_code == 200
    assert api.viewer.post("/api/v1/specs/command", json={"command": "rhyme demo"}).status_code in (200, 503)
    assert entries(api) == []
    assert api.viewer.get("/api/v1/audit").status_code == 403


def test_signing_in_and_out_is_in_the_log(api: Api) -> None:
    opened = api.nobody.post("/api/v1/session", json={"token": api.tokens["viewer"]})
    api.nobody.delete("/api/v1/session", headers={"X-CSRF-Token": opened.json()["csrf"]})
    assert [(one["action"], one["name"], one["browser"]) for one in entries(api)] == [
        ("Sign out", "the viewer", True),
        ("Sign in", "the viewer", True),
    ]


def test_what_the_store_cannot_take_is_done_and_in_the_services_own_log(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writing = api.service.database.writing
    calls = 0

    def busy_after_the_first(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise BusyError("the database is busy")
        return writing(*given, **named)

    api.operator.get("/api/v1/session")  # notes the token's use, which is a write too
    monkeypatch.setattr(api.service.database, "writing", busy_after_the_first)
    with caplog.at_level(logging.ERROR):
        answer = api.operator.post("/api/v1/experiments", json={"name": "ablation"})
    assert answer.status_code == 201
    assert "not in the audit log (BusyError): Create an experiment by the operator" in caplog.text


@stores
def test_a_token_works_until_its_end(api: Api) -> None:
    made = api.operator.post("/api/v1/tokens", json={"name": "a day", "role": "viewer", "days": 1}).json()
    assert made["expires_at"] == pytest.approx(time.time() + 86_400, abs=60)
    own = {"Authorization": f"Bearer {made['token']}"}
    assert api.nobody.get("/api/v1/runs", headers=own).status_code == 200
    opened = api.nobody.post("/api/v1/session", json={"token": made["token"]})
    assert opened.status_code == 200 and api.nobody.get("/api/v1/session").json()["name"] == "a day"
    with api.service.database.writing() as session:
        session.execute(update(Token).where(Token.id == made["id"]).values(expires_at=time.time() - 1))
        assert session.query(BrowserSession).count() == 1
    api.service.callers.forget()
    refused = api.nobody.get("/api/v1/runs", headers=own)
    assert refused.status_code == 401 and "has expired" in refused.json()["detail"]
    # The browser's session ends with its token, and neither opens another one.
    assert api.nobody.get("/api/v1/session").status_code == 401
    assert api.nobody.post("/api/v1/session", json={"token": made["token"]}).status_code == 401
    shown = [one["name"] for one in api.operator.get("/api/v1/tokens").json()["items"]]
    every = [one["name"] for one in api.operator.get("/api/v1/tokens", params={"revoked": True}).json()["items"]]
    assert "a day" not in shown and "a day" in every


@pytest.mark.parametrize("days", [0, -1, 1e9, "soon"])
def test_an_end_is_between_now_and_ten_years(api: Api, days: object) -> None:
    answer = api.operator.post("/api/v1/tokens", json={"name": "x", "role": "viewer", "days": days})
    assert answer.status_code == 422 and "days" in answer.text


def test_a_service_whose_last_operator_expired_prints_a_link_for_a_day(api: Api) -> None:
    from rhyme_openrlhf.api.store import credentials

    now = time.time()
    with api.service.database.writing() as session:
        assert not credentials.nobody_gets_in(session, now)
        session.execute(update(Token).where(Token.role == "operator").values(expires_at=now - 1))
        assert credentials.nobody_gets_in(session, now)
