"""Rules that hold for the whole API: codes of problems, entity tags, addresses of what was created, names."""

from __future__ import annotations

from typing import Any

import pytest

RUN = f"/api/v1/runs/{'a' * 16}"


def code(answer: Any) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["code"]


def test_every_problem_has_a_code_for_programs(api: Any) -> None:
    api.announce()
    assert code(api.nobody.get(RUN)) == (401, "unauthorized")
    assert code(api.viewer.delete(RUN)) == (403, "forbidden")
    assert code(api.viewer.get(RUN, headers={"Host": "evil.example"})) == (400, "wrong_host")
    assert code(api.viewer.get(RUN, headers={"Origin": "https://evil.example"})) == (403, "foreign_origin")
    assert code(api.viewer.get(f"/api/v1/runs/{'f' * 16}")) == (404, "not_found")
    assert code(api.operator.delete(RUN)) == (409, "wrong_state")
    assert code(api.operator.post("/api/v1/runs", json={"arguments": {}})) == (409, "no_cluster")
    assert code(api.operator.patch(RUN, json={"name": ""})) == (422, "invalid_request")
    api.operator.post("/api/v1/experiments", json={"name": "ablation"})
    assert code(api.operator.post("/api/v1/experiments", json={"name": "ablation"})) == (409, "name_taken")
    empty = {"events": [{"kind": "note"}]}
    assert code(api.reporter.post(f"/api/v1/ingest/attempts/{'b' * 16}/batches", json=empty)) == (422, "invalid_event")
    assert code(api.reporter.post(f"/api/v1/ingest/attempts/{'c' * 16}/batches", json={"events": []})) == (
        409,
        "attempt_unknown",
    )
    described = api.app.openapi()["components"]["schemas"]["Problem"]
    assert "code" in described["required"] and "not_found" in described["properties"]["code"]["enum"]


def test_an_edit_is_refused_when_another_was_faster(api: Any, record: Any) -> None:
    api.announce()
    tag = api.viewer.get(RUN).headers["etag"]
    # Reports do not change what people edit.
    api.send(record())
    assert api.viewer.get(RUN).headers["etag"] == tag
    changed = api.operator.patch(RUN, json={"name": "mine"}, headers={"If-Match": tag})
    assert changed.status_code == 200 and changed.headers["etag"] != tag
    late = api.operator.patch(RUN, json={"name": "yours"}, headers={"If-Match": tag})
    assert code(late) == (412, "changed_meanwhile") and api.viewer.get(RUN).json()["name"] == "mine"
    for given in (changed.headers["etag"], f'"x", {changed.headers["etag"]}', "*"):
        assert api.operator.patch(RUN, json={"name": "mine"}, headers={"If-Match": given}).status_code == 200
    assert api.operator.patch(RUN, json={"name": "unconditional"}).status_code == 200


def test_an_experiment_has_an_address_and_a_tag(api: Any) -> None:
    made = api.operator.post("/api/v1/experiments", json={"name": "ablation"})
    place, tag = made.headers["location"], made.headers["etag"]
    assert api.viewer.get(place).json() == made.json() and api.viewer.get(place).headers["etag"] == tag
    assert api.operator.patch(place, json={"description": "d"}, headers={"If-Match": tag}).status_code == 200
    late = api.operator.patch(place, json={"description": "e"}, headers={"If-Match": tag})
    assert code(late) == (412, "changed_meanwhile")
    token = api.operator.post("/api/v1/tokens", json={"name": "grafana", "role": "viewer"})
    shown = api.operator.get(token.headers["location"]).json()
    assert shown == {name: value for name, value in token.json().items() if name != "token"}


@pytest.mark.parametrize(
    "path", ["/runs?limt=5", f"{RUN[7:]}?x=1", "/schema?a=b", "/experiments?limit=5&sort=name", "/runs?%00=1"]
)
def test_unknown_parameters_are_refused(api: Any, path: str) -> None:
    api.announce()
    answer = api.operator.get(f"/api/v1{path}")
    assert code(answer) == (422, "unknown_parameter")
    assert answer.json()["errors"][0]["field"].startswith("query.")
    assert api.operator.get(f"/api/v1{path.partition('?')[0]}").status_code == 200


def test_large_responses_are_compressed_for_clients_that_can_read_them(api: Any, record: Any) -> None:
    api.announce()
    api.send(record())
    for encoding in ("gzip", "identity"):
        answer = api.viewer.get(f"{RUN}/steps", headers={"Accept-Encoding": encoding})
        assert answer.headers.get("content-encoding", "identity") == encoding
        assert len(answer.json()["items"]) == 3
    assert "content-encoding" not in api.viewer.get("/api/v1/runs?limit=1&text=nothing").headers
    head = api.viewer.head(RUN)
    assert head.status_code == 200 and head.content == b"" and head.headers["etag"]


def test_operations_have_short_names(api: Any) -> None:
    names = [one["operationId"] for path in api.app.openapi()["paths"].values() for one in path.values()]
    assert len(names) == len(set(names)) > 50
    assert {"get_runs", "start_run", "resume_run", "get_series"} <= set(names)
    assert max(map(len, names)) < 30
