"""Webhooks through the API: made, tested, listed and deleted, by operators alone."""

from __future__ import annotations

from typing import Any

import pytest

from rhyme_openrlhf.api.store.webhooks import MOST_WEBHOOKS
from rhyme_openrlhf.api.webhooks import deliveries
from tests.api.webhooks.receivers import receiving, until

stores = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
HOOKS = "/api/v1/webhooks"


def made(api: Any, url: str, *events: str, **more: Any) -> dict[str, Any]:
    answer = api.operator.post(HOOKS, json={"name": "team", "url": url, "events": list(events), **more})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"{HOOKS}/{found['id']}"
    return found


def sent(api: Any, **asked: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.operator.get(f"{HOOKS}/deliveries", params=asked).json()["items"]
    return found


@stores
def test_a_run_that_ends_is_told_to_a_webhook_made_over_http(
    make_api: Any, record: Any, monkeypatch: pytest.MonkeyPatch, starts_listener: None
) -> None:
    monkeypatch.setattr(deliveries, "POLL_SECONDS", 0.05)
    api = make_api()
    with receiving() as receiver:
        hook = made(api, receiver.url, "finished", "finished", stalled_minutes=5)
        assert hook["events"] == ["finished"] and hook["secret"].startswith("whsec_")
        api.announce()
        api.send(record())
        until(lambda: any(one["state"] == "delivered" for one in sent(api)))
        assert receiver.verified(hook["secret"])
        (content,) = receiver.contents()
        assert content["run"]["url"] == f"http://127.0.0.1:8420/runs/{'a' * 16}" and content["run"]["step"] == 3
    (row,) = sent(api, webhook=hook["id"])
    assert (row["event"], row["run"], row["status"], row["tries"]) == ("finished", "a" * 16, 200, 1)
    assert sent(api, webhook=hook["id"] + 1) == []
    shown = {name: value for name, value in hook.items() if name != "secret"}
    assert (
        api.operator.get(HOOKS).json()["items"] == [shown] and api.operator.get(f"{HOOKS}/{hook['id']}").json() == shown
    )
    assert api.operator.delete(f"{HOOKS}/{hook['id']}").status_code == 204
    assert api.operator.delete(f"{HOOKS}/{hook['id']}").status_code == 404
    assert sent(api) == []
    log = api.operator.get("/api/v1/audit").json()["items"]
    assert [one["action"] for one in log] == ["Delete a webhook", "Create a webhook"]


def test_a_test_says_how_it_went(api: Any, starts_listener: None) -> None:
    with receiving() as receiver:
        hook = made(api, receiver.url, "failed", form="slack")
        answer = api.operator.post(f"{HOOKS}/{hook['id']}/test").json()
        assert (answer["state"], answer["event"], answer["run"], answer["status"]) == ("delivered", "test", None, 200)
        assert receiver.verified(hook["secret"])
        assert receiver.contents() == [{"text": "This is a test of the webhook “team”"}]
        receiver.answer = b"HTTP/1.1 404 x\r\nContent-Length: 10\r\n\r\nno_service"
        answer = api.operator.post(f"{HOOKS}/{hook['id']}/test").json()
        assert (answer["state"], answer["error"], answer["next_at"]) == ("failed", "it answered 404 no_service", None)
        assert [one["state"] for one in sent(api)] == ["failed", "delivered"]
    assert api.operator.post(f"{HOOKS}/99/test").status_code == 404


@stores
def test_a_changed_webhook_keeps_its_secret_and_sends_to_its_new_address(api: Any, starts_listener: None) -> None:
    with receiving() as before, receiving() as receiver:
        hook = made(api, before.url, "failed", stalled_minutes=5)
        one = f"{HOOKS}/{hook['id']}"
        changes = {"url": receiver.url, "events": ["stalled", "stalled"], "stalled_minutes": 7.5}
        changed = api.operator.patch(one, json=changes)
        assert changed.status_code == 200, changed.text
        expected = {**hook, **changes, "events": ["stalled"]}
        expected.pop("secret")
        assert changed.json() == api.operator.get(one).json() == expected
        assert api.operator.patch(one, json={}).json() == expected
        assert api.operator.post(f"{one}/test").json()["state"] == "delivered"
        assert receiver.verified(hook["secret"]) and before.contents() == []
    for wrong in ({"events": []}, {"url": "ftp://x/"}, {"idle_percent": 100}, {"secret": "mine"}):
        assert api.operator.patch(one, json=wrong).status_code == 422
    assert api.operator.patch(f"{HOOKS}/99", json={"name": "x"}).status_code == 404
    actions = [entry["action"] for entry in api.operator.get("/api/v1/audit").json()["items"]]
    assert actions[-2:] == ["Change a webhook", "Create a webhook"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "ftp://example.org/"),
        ("url", "example.org"),
        ("url", "http://"),
        ("url", "https://me:secret@example.org/"),
        ("url", "http://example.org:99999/"),
        ("url", "http://example.org/" + "x" * 2000),
        ("events", []),
        ("events", ["started"]),
        ("form", "xml"),
        ("stalled_minutes", 0),
        ("reward_fall", 0),
        ("idle_percent", 100),
    ],
)
def test_what_is_wrong_is_named(api: Any, field: str, value: Any) -> None:
    body = {"name": "team", "url": "https://example.org/", "events": ["failed"], field: value}
    answer = api.operator.post(HOOKS, json=body)
    assert answer.status_code == 422 and "secret" not in answer.text
    assert answer.json()["errors"][0]["field"].startswith(f"body.{field}")


def test_an_operator_switches_on_what_another_one_has_left(api: Any) -> None:
    issued = api.operator.post("/api/v1/tokens", json={"name": "leaver", "role": "operator"}).json()
    maker = {"Authorization": f"Bearer {issued['token']}"}
    body = {"name": "team", "url": "https://example.org/", "events": ["failed"]}
    hook = api.nobody.post(HOOKS, json=body, headers=maker).json()
    one = f"{HOOKS}/{hook['id']}"
    assert hook["active"] and api.operator.get(one).json()["active"]
    assert api.operator.delete(f"/api/v1/tokens/{issued['id']}").status_code == 204
    assert not api.operator.get(one).json()["active"]
    assert [row["active"] for row in api.operator.get(HOOKS).json()["items"]] == [False]
    assert api.operator.patch(one, json={"name": "team"}).json()["active"]
    assert api.operator.get(one).json()["active"]


def test_there_is_a_most_of_webhooks(api: Any) -> None:
    for _ in range(MOST_WEBHOOKS):
        made(api, "https://example.org/", "failed")
    body = {"name": "one more", "url": "https://example.org/", "events": ["failed"]}
    assert api.operator.post(HOOKS, json=body).status_code == 409
