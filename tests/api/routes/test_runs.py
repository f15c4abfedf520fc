"""The table of runs and what belongs to one: filters, order, pages, changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.api.read.runs import RUN_SORTS
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.status import RUN_STATUSES
from rhyme_openrlhf.telemetry.events import DraftGain, Note
from tests.examples import examples

pytestmark = pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)

RUNS = "/api/v1/runs"
ONE = f"{RUNS}/{'a' * 16}"


def add_run(api: Any, number: int, **more: Any) -> str:
    values: dict[str, Any] = {
        "uid": f"{number:016x}",
        "origin": "launched",
        "name": f"run {number}",
        "status": "queued",
        "created_at": 1000.0 + number,
        "command": [],
        "config": {},
        "versions": {},
    }
    with api.service.database.writing() as session:
        session.add(Run(**{**values, **more}))
    return f"{number:016x}"


def all_pages(api: Any, limit: int, between: Any = None, **parameters: Any) -> list[str]:
    found: list[str] = []
    cursor = None
    for _ in range(200):
        query = {"limit": limit, **parameters, **({"cursor": cursor} if cursor else {})}
        answer = api.viewer.get(RUNS, params=query)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page["items"]) <= limit
        found += [row["uid"] for row in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found
        if between:
            between()
    raise AssertionError("the pages never end")


def test_a_run_is_shown_with_its_attempts_and_artifacts(reported: Any) -> None:
    run = reported.viewer.get(ONE).json()
    assert run["status"] == "succeeded" and run["step"] == 3 and run["origin"] == "reported"
    assert run["speculation_rate"] == pytest.approx(0.2)
    assert [attempt["number"] for attempt in run["attempts"]] == [1]
    assert reported.viewer.get(f"{ONE}/attempts").json() == run["attempts"]
    artifacts = reported.viewer.get(f"{ONE}/artifacts").json()
    assert [(a["kind"], a["step"], a["path"]) for a in artifacts] == [("checkpoint", 3, "/checkpoints/tag")]
    assert reported.viewer.get(f"{RUNS}/{'e' * 16}").status_code == 404
    assert reported.viewer.get(f"{RUNS}/not-a-uid").status_code == 422


def test_a_run_has_a_verdict_from_its_newest_steps_and_notes(api: Any, record: Any, numbered: Any) -> None:
    api.announce()
    events = record(steps=8, ended=False)
    api.send(events)
    found = api.viewer.get(ONE).json()["verdict"]
    assert found["level"] == "look" and "Step 8 of 8" in found["text"]
    # Engine 0 waits for 2 of 4 s, engine 1 for 1 of 4 s.
    assert "Bubbles 38%, most in the tail." in found["text"]
    (idle,) = found["reasons"]
    assert idle["page"] == "timeline"
    rows = [
        Note(
            "warning",
            "little memory",
        ),
        Note("warning", "little memory"),
        Note("info", "x"),
        Note("error", "e"),
    ]
    rows += [DraftGain(8, 0, 1.9, 1.6, 2.2, 9, True)]
    api.send(numbered([(9e8 + at, "other", row) for at, row in enumerate(rows)]))
    found = api.viewer.get(ONE).json()["verdict"]
    assert found["level"] == "look" and found["text"].endswith("1 error. 1 warning.")
    assert "Drafts: 1.90 times" in found["text"]
    assert {"e", "little memory"} < {one["text"] for one in found["reasons"]}


def test_a_run_is_described_archived_and_deleted(reported: Any) -> None:
    operator = reported.operator
    operator.post("/api/v1/experiments", json={"name": "ablation"})
    change = {"name": "new", "notes": "n", "tags": ["b", "a", "b"], "experiment": "ablation"}
    changed = operator.patch(ONE, json=change).json()
    assert changed["tags"] == ["a", "b"] and changed["experiment"] == "ablation" and changed["name"] == "new"
    again = operator.patch(ONE, json={"tags": ["b", "c"]}).json()
    assert again["tags"] == ["b", "c"] and again["notes"] == "n" and again["experiment"] == "ablation"
    assert operator.patch(ONE, json={"experiment": None}).json()["experiment"] is None
    assert operator.patch(ONE, json={"experiment": "none such"}).status_code == 404
    assert operator.patch(ONE, json={"status": "failed"}).status_code == 422
    assert operator.delete(ONE).status_code == 409
    archived = operator.post(f"{ONE}/archive").json()["archived_at"]
    assert archived == operator.post(f"{ONE}/archive").json()["archived_at"]
    assert all_pages(reported, 10) == [] and all_pages(reported, 10, archived="yes") == ["a" * 16]
    assert operator.post(f"{ONE}/unarchive").json()["archived_at"] is None
    operator.post(f"{ONE}/archive")
    assert operator.delete(ONE).status_code == 204
    assert reported.viewer.get(ONE).status_code == 404


def test_a_run_that_has_not_ended_is_not_deleted(api: Any) -> None:
    uid = add_run(api, 1, status="running", archived_at=5.0)
    assert api.operator.delete(f"{RUNS}/{uid}").status_code == 409


def test_filters(api: Any) -> None:
    operator = api.operator
    operator.post("/api/v1/experiments", json={"name": "e"})
    one = add_run(api, 1, name="100%_sure", status="failed")
    two = add_run(api, 2, notes="Ünlike", status="running", origin="imported")
    three = add_run(api, 3, status="queued")
    operator.patch(f"{RUNS}/{one}", json={"tags": ["x", "y"], "experiment": "e"})
    operator.patch(f"{RUNS}/{two}", json={"tags": ["x"]})
    assert all_pages(api, 10) == [three, two, one]
    assert all_pages(api, 10, status=["failed", "running"]) == [two, one]
    assert all_pages(api, 10, tag=["x", "y"]) == [one]
    assert all_pages(api, 10, tag="x") == [two, one]
    assert all_pages(api, 10, experiment="e") == [one]
    assert all_pages(api, 10, text="100%_") == [one]
    assert all_pages(api, 10, text="%") == [one]
    assert all_pages(api, 10, text="UNLIKE".replace("U", "Ü", 1)) == [two]
    assert all_pages(api, 10, text=three) == [three]
    assert all_pages(api, 10, origin="imported") == [two]
    assert all_pages(api, 10, created_from=1002.0, created_to=1002.5) == [two]
    assert all_pages(api, 10, archived="yes") == []


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rewards=st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1 / 3, -1.0])), min_size=1, max_size=12),
    sort=st.sampled_from(["reward", "created_at", "name", "status", "tokens_per_second"]),
    direction=st.sampled_from(["asc", "desc"]),
    limit=st.integers(1, 5),
)
def test_pages_are_complete_and_without_repeats_while_rows_are_added(
    api: Any, rewards: list[float | None], sort: str, direction: str, limit: int
) -> None:
    with api.service.database.writing() as session:
        session.query(Run).delete()
    for i, reward in enumerate(rewards):
        add_run(api, i + 1, reward=reward, tokens_per_second=reward, name=f"n{i % 3}", status=RUN_STATUSES[i % 4])
    there = {f"{i + 1:016x}" for i in range(len(rewards))}
    quiet = all_pages(api, limit, sort=sort, direction=direction)
    assert len(quiet) == len(set(quiet)) and set(quiet) == there
    # Not for ever: a list that grows faster than it is read has no end.
    added = iter(range(1000, 1008))

    def between() -> None:
        if (number := next(added, None)) is not None:
            add_run(api, number, reward=(number % 7) / 7, name=f"n{number % 5}", created_at=float(number))

    busy = all_pages(api, limit, between, sort=sort, direction=direction)
    assert len(busy) == len(set(busy))
    assert [uid for uid in busy if uid in there] == quiet


def test_rows_without_a_value_come_last_in_both_directions(api: Any) -> None:
    ids = [add_run(api, i, reward=reward) for i, reward in enumerate([None, 2.0, 1.0], start=1)]
    assert all_pages(api, 1, sort="reward", direction="asc") == [ids[2], ids[1], ids[0]]
    assert all_pages(api, 1, sort="reward", direction="desc") == [ids[1], ids[2], ids[0]]


def test_every_column_sorts(reported: Any) -> None:
    for sort in RUN_SORTS:
        assert all_pages(reported, 1, sort=sort) == ["a" * 16]


@pytest.mark.parametrize("cursor", ["x", "e30", "W10", "\N{SNOWMAN}", "WyJhIiwgImIiLCAxLCAyXQ", "[" * 4000])
def test_a_made_up_cursor_is_refused(reported: Any, cursor: str) -> None:
    assert reported.viewer.get(RUNS, params={"cursor": cursor}).status_code == 422


def test_a_cursor_of_another_order_is_refused(api: Any) -> None:
    for i in range(3):
        add_run(api, i + 1)
    cursor = api.viewer.get(RUNS, params={"limit": 1}).json()["next_cursor"]
    assert api.viewer.get(RUNS, params={"cursor": cursor, "sort": "name"}).status_code == 422
    assert api.viewer.get(RUNS, params={"cursor": cursor, "direction": "asc"}).status_code == 422


def test_experiments(api: Any) -> None:
    url = "/api/v1/experiments"
    made = api.operator.post(url, json={"name": "one", "description": "d"})
    assert made.status_code == 201
    assert api.operator.post(url, json={"name": "one"}).status_code == 409
    other = api.operator.post(url, json={"name": "two"}).json()["id"]
    assert api.operator.patch(f"{url}/{other}", json={"name": "one"}).status_code == 409
    uid = add_run(api, 1)
    api.operator.patch(f"{RUNS}/{uid}", json={"experiment": "one"})
    listed = api.viewer.get(url).json()
    assert [(row["name"], row["runs"]) for row in listed["items"]] == [("one", 1), ("two", 0)]
    first = api.viewer.get(url, params={"limit": 1}).json()
    assert [row["name"] for row in first["items"]] == ["one"] and first["next_cursor"]
    assert api.operator.delete(f"{url}/{made.json()['id']}").status_code == 204
    assert api.viewer.get(f"{RUNS}/{uid}").json()["experiment"] is None
    assert api.operator.delete(f"{url}/{made.json()['id']}").status_code == 404


def test_a_list_of_a_thousand_runs_is_quick(api: Any) -> None:
    with api.service.database.writing() as session:
        session.add_all(
            Run(uid=f"{i:016x}", origin="launched", name=f"run {i}", status="queued", created_at=float(i))
            for i in range(1, 1001)
        )
    began = time.process_time()
    assert len(api.viewer.get(RUNS, params={"limit": 50}).json()["items"]) == 50
    assert time.process_time() - began < 2.0
