"""Permissions of every route, so that none is open by accident."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.app import ROUTERS, create_app
from rhyme_openrlhf.api.routes import health
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.models import BrowserSession, Run, SignInCode

# Open to all: probes say nothing, and signing in brings its own token or code.
PUBLIC = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("POST", "/api/v1/session"),
    ("POST", "/api/v1/session/openid"),
    ("POST", "/api/v1/session/openid/begin"),
    ("POST", "/api/v1/tokens/exchange"),
}
# The session's, at the port that the test clients ask.
COOKIE = f"{auth.COOKIE}_8420"
FORBIDDEN_TO_VIEWERS = {"POST", "PATCH", "DELETE", "PUT"}
# What viewers may not even read: secrets, addresses with secrets, who did what, whole directories.
OPERATORS_ALONE = ("/api/v1/tokens", "/api/v1/webhooks", "/api/v1/audit")
# A viewer ends its own session, and keeps views of its own.
VIEWERS_OWN = {("POST", "/api/v1/specs/validate"), ("POST", "/api/v1/specs/command"), ("DELETE", "/api/v1/session")}
VIEWERS_OWN |= {("POST", "/api/v1/views"), ("PATCH", "/api/v1/views/{view_id}"), ("DELETE", "/api/v1/views/{view_id}")}


def routes(app: Any) -> Iterator[tuple[str, str]]:
    walked = set()
    for router in (*ROUTERS, health.router):
        for route in router.routes:
            assert isinstance(route, APIRoute), f"a route that this walk cannot judge: {route}"
            walked.add(app.state.templates[route.endpoint])
            for method in route.methods:
                yield method, app.state.templates[route.endpoint]
    # Nothing else is in the service. Newer releases of FastAPI have a router as one object in `app.routes`.
    for one in app.routes:
        assert getattr(one, "original_router", None) in (*ROUTERS, health.router) or one.path in walked


def filled(path: str) -> str:
    values = {"{uid}": "a" * 16, "{number}": "1", "{step}": "1", "{table}": "steps", "{name:path}": "x.log"}
    values |= {"{token_id}": "1", "{experiment_id}": "1", "{webhook_id}": "1", "{view_id}": "1"}
    for name, value in values.items():
        path = path.replace(name, value)
    assert "{" not in path, f"tell this test what to put into {path}"
    return path


def test_no_route_answers_without_a_token(api: Any) -> None:
    walked = set()
    for method, path in routes(api.app):
        walked.add((method, path))
        if (method, path) in PUBLIC:
            continue
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"{COOKIE}=wrong"}):
            answer = api.nobody.request(method, filled(path), headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert walked >= PUBLIC


def test_each_route_refuses_the_wrong_role(api: Any) -> None:
    for method, path in routes(api.app):
        if (method, path) in PUBLIC:
            continue
        reports = path.startswith("/api/v1/ingest/")
        if not reports:
            assert api.reporter.request(method, filled(path)).status_code == 403, (method, path)
        changes = method in FORBIDDEN_TO_VIEWERS and (method, path) not in VIEWERS_OWN
        if changes or reports or path.startswith(OPERATORS_ALONE) or path.endswith("/archive"):
            assert api.viewer.request(method, filled(path)).status_code == 403, (method, path)


def test_each_start_makes_a_code_that_is_kept_as_its_digest(make_settings: Any, tmp_path: Any) -> None:
    shown: list[str] = []
    for _ in range(2):
        app = create_app(make_settings(), show_link=shown.append)
        with TestClient(app, base_url="http://127.0.0.1:8420") as client:
            assert client.post("/api/v1/session", json={"token": shown[-1]}).json()["role"] == "operator"
        # The next one is kept: nobody takes it.
        with TestClient(create_app(make_settings(), show_link=shown.append), base_url="http://127.0.0.1"):
            pass
    assert len(set(shown)) == 4
    store = sqlite3.connect(tmp_path / "data" / "rhyme.sqlite")
    dump = "\n".join(store.iterdump())
    assert not any(code in dump for code in shown)
    lifetimes = dict(store.execute("SELECT digest, expires_at - created_at FROM sign_in_codes"))
    assert lifetimes == {credentials.digest(code): credentials.CODE_SECONDS for code in (shown[1], shown[3])}
    link = credentials.sign_in_link("http://127.0.0.1:8420", shown[0])
    assert link.partition("#")[0] == "http://127.0.0.1:8420/"


def test_a_code_lasts_longer_while_nobody_gets_in(make_settings: Any, tmp_path: Any) -> None:
    with TestClient(create_app(make_settings(), show_link=lambda code: None), base_url="http://127.0.0.1"):
        pass
    store = sqlite3.connect(tmp_path / "data" / "rhyme.sqlite")
    assert store.execute("SELECT expires_at - created_at FROM sign_in_codes").fetchall() == [
        (credentials.FIRST_CODE_SECONDS,)
    ]


def new_code(api: Any, now: float | None = None) -> str:
    with api.service.database.writing() as session:
        return credentials.issue_code(session, now or time.time(), credentials.CODE_SECONDS)


def test_a_code_opens_one_session_which_an_operator_can_close(api: Any) -> None:
    code = new_code(api)
    browser = TestClient(api.app, base_url="http://127.0.0.1:8420")
    assert browser.post("/api/v1/session", json={"token": code}).json()["name"] == "sign-in link"
    assert browser.get("/api/v1/tokens").status_code == 200
    for path, body in (("session", {"token": code}), ("tokens/exchange", {"code": code, "name": "x"})):
        again = api.nobody.post(f"/api/v1/{path}", json=body)
        assert again.status_code == 401 and "used up or too old" in again.json()["detail"]
    other = TestClient(api.app, base_url="http://127.0.0.1:8420")
    assert other.post("/api/v1/session", json={"token": new_code(api)}).status_code == 200
    rows = [row for row in api.operator.get("/api/v1/tokens").json()["items"] if row["name"] == "sign-in link"]
    assert len(rows) == 1
    assert api.operator.delete(f"/api/v1/tokens/{rows[0]['id']}").status_code == 204
    assert browser.get("/api/v1/runs").status_code == 401
    assert other.get("/api/v1/runs").status_code == 401


def test_an_old_code_opens_nothing(api: Any) -> None:
    code = new_code(api, time.time() - credentials.CODE_SECONDS - 1)
    assert api.nobody.post("/api/v1/session", json={"token": code}).status_code == 401
    assert api.nobody.post("/api/v1/tokens/exchange", json={"code": code, "name": "x"}).status_code == 401
    new_code(api)
    with api.service.database.reading() as session:
        assert session.get(SignInCode, credentials.digest(code)) is None


def test_a_script_exchanges_a_code_for_a_token_of_its_own(api: Any) -> None:
    made = api.nobody.post("/api/v1/tokens/exchange", json={"code": new_code(api), "name": "laptop"})
    assert made.status_code == 201 and made.json()["name"] == "laptop"
    headers = {"Authorization": f"Bearer {made.json()['token']}"}
    assert api.nobody.get("/api/v1/session", headers=headers).json()["role"] == "operator"
    # A token is no code: nobody makes two of one.
    body = {"code": api.tokens["operator"], "name": "more"}
    assert api.nobody.post("/api/v1/tokens/exchange", json=body).status_code == 401


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
def test_of_several_who_exchange_one_code_at_once_one_wins(api: Any) -> None:
    callers = 4
    for _ in range(5):
        code, turn = new_code(api), threading.Barrier(callers)

        def exchange(caller: int, code: str = code, turn: threading.Barrier = turn) -> int:
            turn.wait()
            path = "session" if caller % 2 else "tokens/exchange"
            body = {"token": code} if caller % 2 else {"code": code, "name": "x"}
            status: int = api.nobody.post(f"/api/v1/{path}", json=body).status_code
            return status

        with ThreadPoolExecutor(callers) as pool:
            statuses = list(pool.map(exchange, range(callers)))
        assert sorted(status // 100 for status in statuses) == [2, 4, 4, 4], statuses


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
def test_a_code_that_two_transactions_take_goes_to_one(api: Any) -> None:
    """The second begins to take the code while the first has not committed."""
    code = new_code(api)
    database = api.service.database

    def take() -> bool:
        with database.writing() as session:
            return credentials.take_code(session, code, time.time())

    with ThreadPoolExecutor(1) as pool:
        with database.writing() as session:
            assert credentials.take_code(session, code, time.time())
            second = pool.submit(take)
            time.sleep(0.2)
        assert not second.result(30)


def test_the_store_and_its_folder_are_their_owners_alone(api: Any, tmp_path: Any) -> None:
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_a_browser_signs_in_changes_something_and_signs_out(reported: Any) -> None:
    browser = TestClient(reported.app, base_url="http://127.0.0.1:8420")
    signed_in = browser.post("/api/v1/session", json={"token": reported.tokens["operator"]})
    assert signed_in.status_code == 200
    cookie = signed_in.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Secure" not in cookie
    csrf = signed_in.json()["csrf"]
    assert browser.get("/api/v1/session").json() == {"name": "the operator", "role": "operator", "csrf": csrf}
    path = f"/api/v1/runs/{'a' * 16}"
    assert browser.get(path).status_code == 200
    assert browser.patch(path, json={"notes": "x"}).status_code == 403
    assert browser.patch(path, json={"notes": "x"}, headers={auth.CSRF_HEADER: "wrong"}).status_code == 403
    assert browser.patch(path, json={"notes": "x"}, headers={auth.CSRF_HEADER: b"\xe4"}).status_code == 403
    assert browser.patch(path, json={"notes": "x"}, headers={auth.CSRF_HEADER: csrf}).status_code == 200
    kept = browser.cookies[COOKIE]
    assert browser.delete("/api/v1/session", headers={auth.CSRF_HEADER: csrf}).status_code == 204
    again = browser.get(path, headers={"Cookie": f"{COOKIE}={kept}"})
    assert again.status_code == 401


def test_the_cookie_is_secure_with_tls(make_api: Any) -> None:
    api = make_api(tls_cert="cert.pem", tls_key="key.pem")
    answer = api.nobody.post("/api/v1/session", json={"token": api.tokens["viewer"]})
    assert "Secure" in answer.headers["set-cookie"]
    assert "max-age" in answer.headers["strict-transport-security"]


def test_two_services_on_one_host_sign_nobody_out_of_the_other(make_settings: Any, tmp_path: Any) -> None:
    jar: dict[str, str] = {}
    with ExitStack() as stack:
        browsers = []
        for port in (8420, 8421):
            shown: list[str] = []
            app = create_app(make_settings(data_dir=str(tmp_path / str(port))), show_link=shown.append)
            browsers.append(stack.enter_context(TestClient(app, base_url=f"http://127.0.0.1:{port}")))
            assert browsers[-1].post("/api/v1/session", json={"token": shown[0]}).status_code == 200
            # Browsers keep cookies by host and name, for all ports together.
            jar |= dict(browsers[-1].cookies)
        cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())}
        assert [browser.get("/api/v1/runs", headers=cookies).status_code for browser in browsers] == [200, 200]


@pytest.mark.parametrize(
    ("peer", "said", "name"),
    [
        ("10.0.0.7", "https", "__Host-rhyme_session_8420"),
        ("10.0.0.7", "http", "rhyme_session_8420"),
        ("10.9.9.9", "https", "rhyme_session_8420"),
    ],
)
def test_the_cookie_is_secure_behind_a_proxy_that_speaks_https(make_api: Any, peer: str, said: str, name: str) -> None:
    api = make_api(trusted_proxies="10.0.0.0/24")
    browser = TestClient(api.app, base_url="http://127.0.0.1:8420", client=(peer, 1))
    headers = {"X-Forwarded-Proto": said}
    answer = browser.post("/api/v1/session", json={"token": api.tokens["viewer"]}, headers=headers)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{name}=") and ("Secure" in cookie) == name.startswith("__Host-") and "Path=/" in cookie
    headers["Cookie"] = cookie.partition(";")[0]
    described = browser.get("/api/v1/openapi.json", headers=headers)
    assert described.json()["components"]["securitySchemes"]["APIKeyCookie"]["name"] == name


def test_wrong_tokens_lock_no_valid_one_out(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    api = make_api(sign_ins_per_minute=20)
    # Another one is allowed after 3 s, which all of this may take on a busy machine.
    monkeypatch.setattr(api.service.limits.sign_ins, "_clock", lambda: 0.0)
    code = new_code(api)
    wrong = {"Authorization": "Bearer rhyme_wrong"}
    statuses = [api.nobody.get("/api/v1/runs", headers=wrong).status_code for _ in range(25)]
    assert statuses == [401] * 20 + [429] * 5
    for secret in ("wrong", "once_wrong"):
        assert api.nobody.post("/api/v1/session", json={"token": secret}).status_code == 429
        assert api.nobody.post("/api/v1/tokens/exchange", json={"code": secret, "name": "x"}).status_code == 429
    assert [api.viewer.get("/api/v1/runs").status_code, api.operator.get("/api/v1/runs").status_code] == [200, 200]
    assert api.nobody.post("/api/v1/session", json={"token": api.tokens["viewer"]}).status_code == 200
    assert api.nobody.post("/api/v1/session", json={"token": code}).status_code == 200


def test_a_reporter_has_no_pages(api: Any) -> None:
    assert api.nobody.post("/api/v1/session", json={"token": api.tokens["reporter"]}).status_code == 401


def test_a_bearer_token_needs_no_csrf_even_with_a_cookie(reported: Any) -> None:
    headers = {"Cookie": f"{COOKIE}=whatever"}
    answer = reported.operator.patch(f"/api/v1/runs/{'a' * 16}", json={"notes": "x"}, headers=headers)
    assert answer.status_code == 200


def test_revoking_a_token_closes_it_and_its_sessions_now(api: Any) -> None:
    made = api.operator.post("/api/v1/tokens", json={"name": "grafana", "role": "viewer"})
    assert made.status_code == 201
    token = made.json()
    assert token["token"].startswith(token["prefix"])
    browser = TestClient(api.app, base_url="http://127.0.0.1:8420")
    assert browser.post("/api/v1/session", json={"token": token["token"]}).status_code == 200
    script = {"Authorization": f"Bearer {token['token']}"}
    assert api.nobody.get("/api/v1/runs", headers=script).status_code == 200
    assert browser.get("/api/v1/runs").status_code == 200
    assert api.operator.delete(f"/api/v1/tokens/{token['id']}").status_code == 204
    assert api.nobody.get("/api/v1/runs", headers=script).status_code == 401
    assert browser.get("/api/v1/runs").status_code == 401
    listed = api.operator.get("/api/v1/tokens", params={"revoked": True})
    assert token["token"] not in listed.text and token["id"] in [row["id"] for row in listed.json()["items"]]
    assert token["id"] not in [row["id"] for row in api.operator.get("/api/v1/tokens").json()["items"]]


def test_an_expired_session_opens_nothing_and_is_cleared_away(api: Any) -> None:
    with api.service.database.writing() as session:
        opened = credentials.open_session(session, api.tokens["viewer"], time.time() - 7200, 1.0)
        assert opened is not None
    headers = {"Cookie": f"{COOKIE}={opened[0]}"}
    assert api.nobody.get("/api/v1/runs", headers=headers).status_code == 401
    api.nobody.post("/api/v1/session", json={"token": api.tokens["viewer"]})
    with api.service.database.reading() as session:
        assert session.get(BrowserSession, credentials.digest(opened[0])) is None


def test_a_runs_own_token_reports_for_no_other_run(reported: Any) -> None:
    reported.announce(run="c" * 16, attempt="d" * 16)
    made = reported.operator.post("/api/v1/tokens", json={"name": "r", "role": "reporter", "run": "a" * 16})
    headers = {"Authorization": f"Bearer {made.json()['token']}"}
    for attempt, status in (("b" * 16, 200), ("d" * 16, 403)):
        url = f"/api/v1/ingest/attempts/{attempt}"
        assert reported.nobody.post(f"{url}/batches", json={"events": []}, headers=headers).status_code == status
        run = "a" * 16 if status == 200 else "c" * 16
        body = {"run": run, "name": "n", "run_directory": "", "config": {}}
        assert reported.nobody.put(url, json=body, headers=headers).status_code == status
    assert made.json()["run"] == "a" * 16


def test_only_a_reporters_token_belongs_to_a_run(reported: Any) -> None:
    body = {"name": "r", "role": "viewer", "run": "a" * 16}
    assert reported.operator.post("/api/v1/tokens", json=body).status_code == 422
    body = {"name": "r", "role": "reporter", "run": "e" * 16}
    assert reported.operator.post("/api/v1/tokens", json=body).status_code == 404


def test_guessing_tokens_is_slowed_down(make_api: Callable[..., Any]) -> None:
    api = make_api(sign_ins_per_minute=3.0)
    codes = [api.nobody.post("/api/v1/session", json={"token": f"wrong{i}"}).status_code for i in range(5)]
    assert codes == [401, 401, 401, 429, 429]
    answer = api.nobody.get("/api/v1/runs", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1


def test_use_is_noted_but_not_at_every_request(api: Any) -> None:
    def last_used() -> float:
        rows = api.operator.get("/api/v1/tokens").json()["items"]
        found: float = next(row["last_used_at"] for row in rows if row["role"] == "viewer")
        return found

    api.viewer.get("/api/v1/runs")
    first = last_used()
    assert first == pytest.approx(time.time(), abs=60)
    api.viewer.get("/api/v1/runs")
    assert last_used() == first


def test_deleting_a_run_takes_its_token_with_it(reported: Any) -> None:
    made = reported.operator.post("/api/v1/tokens", json={"name": "r", "role": "reporter", "run": "a" * 16}).json()
    reported.operator.post(f"/api/v1/runs/{'a' * 16}/archive")
    assert reported.operator.delete(f"/api/v1/runs/{'a' * 16}").status_code == 204
    with reported.service.database.reading() as session:
        assert session.query(Run).count() == 0
    headers = {"Authorization": f"Bearer {made['token']}"}
    answer = reported.nobody.post(f"/api/v1/ingest/attempts/{'b' * 16}/batches", json={"events": []}, headers=headers)
    assert answer.status_code == 401
