"""Hostile text through every field: nothing fails, nothing is executed, and what is kept comes back as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)

CORPUS = [
    "'; DROP TABLE runs; --", '" OR 1=1 --', "1); DELETE FROM tokens; --", "$(touch /tmp/owned)", "`id`",
    "; rm -rf / #", "|| true", "../../../etc/passwd", "..\\..\\windows", "/etc/passwd", "file:///etc/passwd", "%00",
    "%2e%2e%2f", "x\r\nSet-Cookie: owned=1", "x\nX-Owned: 1", "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>', "javascript:alert(1)", "{{7*7}}", "${jndi:ldap://x}", "%s%n%x", "{0.__class__}",
    "=cmd|' /C calc'!A0", "\u202egnp.exe", "\ufeff\u200b", "ZA̡͊͠͝LGO", "😀" * 40, " ", "null", "-1", "1e309",
    "\x7f\x1b[31m",
]  # fmt: skip
UNKEEPABLE = ["\0", "a\0b", "\ud800"]
# A service takes longer to make than to ask: each is asked with several texts.
PARTS = [CORPUS[n::4] for n in range(4)]
RUN = "a" * 16
ONE = f"/api/v1/runs/{RUN}"


@pytest.mark.parametrize("texts", PARTS, ids=range(len(PARTS)))
def test_text_comes_back_as_it_was(reported: Any, texts: list[str]) -> None:
    operator = reported.operator
    for text in texts:
        assert operator.post("/api/v1/experiments", json={"name": text, "description": text}).status_code == 201, text
        change = {"name": text, "notes": text, "tags": [text], "experiment": text}
        changed = operator.patch(ONE, json=change)
        assert changed.status_code == 200, changed.text
        for run in (changed.json(), reported.viewer.get(ONE).json()):
            assert {name: run[name] for name in change} == change
        for query in ({"text": text}, {"tag": text}, {"experiment": text}):
            found = reported.viewer.get("/api/v1/runs", params=query)
            assert [run["uid"] for run in found.json()["items"]] == [RUN], (query, found.text)
        experiments = reported.viewer.get("/api/v1/experiments").json()["items"]
        assert [one["description"] for one in experiments if one["name"] == text] == [text]
        made = operator.post("/api/v1/tokens", json={"name": text, "role": "viewer"}).json()
        assert made["name"] == text
        named = [token["name"] for token in operator.get("/api/v1/tokens").json()["items"]]
        assert text in named
        assert text.encode("utf-8")[:1] in reported.viewer.get("/api/v1/export/runs").content
        assert reported.viewer.get("/metrics").status_code == 200, text


@pytest.mark.parametrize("texts", PARTS, ids=range(len(PARTS)))
def test_what_a_reporter_says_comes_back_as_it_was(api: Any, texts: list[str]) -> None:
    for number, text in enumerate(texts):
        uid, attempt = f"{number:016x}", f"{number + 1000:016x}"
        one = f"/api/v1/runs/{uid}"
        config = {"command": ["rhyme", text], "settings": {text: text}, "versions": {text: text}}
        api.announce(uid, attempt, name=text, run_directory=text, config=config)
        note = {"kind": "note", "time": 1.0, "source": text[:20], "sequence": 0, "level": "info", "text": text}
        other = {"kind": text[:30], "time": 1.0, "source": "s", "sequence": 0, "field": {text: [text]}}
        api.send([note, other], attempt)
        run = api.viewer.get(one).json()
        assert run["name"] == text and run["command"] == ["rhyme", text]
        assert run["config"] == {"settings": {text: text}} and run["versions"] == {text: text}
        assert run["attempts"][0]["run_directory"] == text
        events = api.viewer.get(f"{one}/events", params={"source": text[:20]}).json()["items"]
        assert events[0]["body"] == {"level": "info", "text": text}
        unknown = api.viewer.get(f"{one}/events", params={"kind": text[:30]}).json()["items"]
        assert unknown[0]["body"] == {"field": {text: [text]}}
        assert api.viewer.get(f"{one}/attempts/1/logs").status_code == 404


@pytest.mark.parametrize("texts", [*PARTS, ["\0"]], ids=range(len(PARTS) + 1))
def test_in_queries_and_paths_it_is_refused_or_finds_nothing(reported: Any, texts: list[str]) -> None:
    viewer = reported.viewer
    queries = {
        "/api/v1/runs": ["status", "origin", "tag", "experiment", "text", "archived", "sort", "direction", "limit",
                         "cursor", "created_from", "created_to"],
        f"{ONE}/steps": ["from_step", "to_step", "limit", "cursor", "direction"],
        f"{ONE}/samples": ["engine", "cursor"],
        f"{ONE}/events": ["kind", "source", "cursor", "direction"],
        f"{ONE}/series": ["names", "from_step", "points", "axis"],
        f"{ONE}/timeline": ["from_step", "to_step", "engine", "worst", "limit"],
        "/api/v1/compare": ["run", "names", "axis"],
        "/api/v1/config-diff": ["a", "b"],
        f"/api/v1/export/runs/{RUN}/steps": ["format"],
        "/api/v1/experiments": ["cursor"],
    }  # fmt: skip
    for text in texts:
        for path, names in queries.items():
            for name in names:
                answer = viewer.get(path, params={name: text})
                assert answer.status_code in (200, 422), (path, name, answer.status_code)
                assert "set-cookie" not in answer.headers and "x-owned" not in answer.headers
        quoted = "".join(f"%{byte:02x}" for byte in text.encode())
        for path in (f"/api/v1/runs/{quoted}", f"{ONE}/attempts/{quoted}/logs", f"{ONE}/attempts/1/logs/{quoted}",
                     f"{ONE}/steps/{quoted}/engines", f"/api/v1/export/runs/{RUN}/{quoted}"):  # fmt: skip
            assert viewer.get(path).status_code in (404, 422), path
        header = text.encode("utf-8").replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"")
        for name in ("Authorization", "Cookie", "X-CSRF-Token", "Last-Event-ID", "Idempotency-Key", "Origin", "Host"):
            assert reported.nobody.get("/api/v1/runs", headers={name: header}).status_code < 500


@pytest.mark.parametrize("text", UNKEEPABLE)
def test_what_no_database_keeps_is_refused_by_field(reported: Any, text: str) -> None:
    bodies = [
        ("POST", "/api/v1/experiments", {"name": text}),
        ("POST", "/api/v1/experiments", {"name": "x", "description": text}),
        ("PATCH", ONE, {"name": text}),
        ("PATCH", ONE, {"notes": text}),
        ("PATCH", ONE, {"tags": [text]}),
        ("PATCH", ONE, {"experiment": text}),
        ("PATCH", ONE, {text: 1}),
        ("POST", "/api/v1/tokens", {"name": text, "role": "viewer"}),
        ("POST", "/api/v1/tokens", {"name": "x", "role": text}),
        ("POST", "/api/v1/session", {"token": text}),
        ("POST", "/api/v1/imports", {"directory": text}),
    ]
    for method, path, body in bodies:
        answer = send_ascii(reported.operator, method, path, body)
        assert answer.status_code == 422, (path, body, answer.status_code, answer.text)
        assert answer.json()["errors"][0]["field"].startswith("body")


def send_ascii(client: Any, method: str, path: str, body: Any) -> Any:
    """JSON with every odd character escaped, as a lone surrogate must be."""
    content = json.dumps(body, ensure_ascii=True).encode()
    return client.request(method, path, content=content, headers={"Content-Type": "application/json"})
