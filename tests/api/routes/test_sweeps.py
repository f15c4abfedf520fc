"""Sweeps over HTTP: all runs or none, once for a key, stopped together."""

from __future__ import annotations

from typing import Any

import pytest

SWEEP: dict[str, Any] = {
    "name": "lr-and-seed",
    "command": "rhyme demo",
    "options": {"actor.adam.lr": [1e-6, 3e-6], "train.seed": [1, 2, 3]},
    "tags": ["nightly"],
}


def runs_of(launched: Any, **asked: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = launched.viewer.get("/api/v1/runs", params={"limit": 200, **asked}).json()["items"]
    return found


def test_a_grid_is_one_experiment_in_the_queue(launched: Any) -> None:
    answer = launched.operator.post("/api/v1/sweeps", json=SWEEP)
    assert answer.status_code == 201, answer.text
    sweep = answer.json()
    assert answer.headers["location"] == f"/api/v1/experiments/{sweep['experiment']}"
    assert [run["name"] for run in sweep["runs"]] == [f"lr-and-seed-{number}" for number in range(1, 7)]
    assert [(run["options"]["actor.adam.lr"], run["options"]["train.seed"]) for run in sweep["runs"]] == [
        (1e-6, 1), (1e-6, 2), (1e-6, 3), (3e-6, 1), (3e-6, 2), (3e-6, 3),
    ]  # fmt: skip
    found = runs_of(launched, experiment="lr-and-seed", filter="config.actor.adam.lr = 3e-6")
    assert {run["uid"] for run in found} == {run["uid"] for run in sweep["runs"][3:]}
    assert all(run["status"] == "queued" and run["tags"] == ["nightly"] for run in found)
    assert launched.operator.get(answer.headers["location"]).json()["runs"] == 6


def test_random_draws_follow_their_seed(launched: Any) -> None:
    drawn = {"options": {"actor.adam.lr": {"low": 1e-7, "high": 1e-5, "scale": "log"}}, "count": 5, "seed": 3}
    first = launched.operator.post("/api/v1/sweeps", json={**SWEEP, **drawn}).json()["runs"]
    again = launched.operator.post("/api/v1/sweeps", json={**SWEEP, **drawn, "name": "again"}).json()["runs"]
    values = [run["options"]["actor.adam.lr"] for run in first]
    assert values == [run["options"]["actor.adam.lr"] for run in again]
    assert len(set(values)) == 5 and all(1e-7 <= value <= 1e-5 for value in values)


def test_a_sweep_is_grouped_by_what_differs_but_the_seed(launched: Any) -> None:
    written = {"actor.adam.lr": "1e-6, 3e-6", "train.seed": "1,2,3"}
    sweep = launched.operator.post("/api/v1/sweeps", json={**SWEEP, "options": written}).json()
    listed = launched.operator.post("/api/v1/sweeps", json={**SWEEP, "name": "listed"}).json()
    assert [run["options"] for run in sweep["runs"]] == [run["options"] for run in listed["runs"]]
    found = launched.viewer.get(f"/api/v1/experiments/{sweep['experiment']}/groups").json()["groups"]
    assert [group["options"] for group in found] == [{"actor.adam.lr": 1e-6}, {"actor.adam.lr": 3e-6}]
    assert [[run["seed"] for run in group["runs"]] for group in found] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"options": {"actor.adam.learning": [1]}}, "options.actor.adam.learning", "there is no such option"),
        ({"options": {"train.seed": {"low": 1, "high": 9}}}, "options.train.seed", "random draws alone"),
        ({"options": {"train.seed": list(range(400)), "rollout.temperature": [0.5, 1.0]}}, "options", "800 runs"),
        ({"options": {}}, "options", "at least one option"),
        ({"options": {"actor.adam.lr": "log:a..b"}}, "options.actor.adam.lr", "a range is LOW..HIGH"),
        ({"arguments": {"ckpt": {"path": "/somewhere"}}}, "arguments.ckpt.path", "all its runs would write there"),
        ({"options": {"histospec.window_max": [16, 900]}}, "options.histospec.window_max", "each value"),
    ],
)
def test_a_fault_names_its_option_and_nothing_is_made(launched: Any, change: Any, field: str, said: str) -> None:
    answer = launched.operator.post("/api/v1/sweeps", json={**SWEEP, **change})
    assert answer.status_code == 422, answer.text
    found = {one["field"]: one["message"] for one in answer.json()["errors"]}
    assert said in found[f"body.{field}"]
    assert runs_of(launched) == []


def test_the_same_key_starts_one_sweep(launched: Any) -> None:
    headers = {"Idempotency-Key": "k" * 200}
    first = launched.operator.post("/api/v1/sweeps", json=SWEEP, headers=headers)
    again = launched.operator.post("/api/v1/sweeps", json=SWEEP, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200) and first.json() == again.json()
    assert len(runs_of(launched)) == 6
    other = launched.operator.post("/api/v1/sweeps", json={**SWEEP, "notes": "other"}, headers=headers)
    assert other.status_code == 409 and other.json()["code"] == "idempotency_key_reused"
    assert len(runs_of(launched)) == 6
    # The repetition did nothing, and the log says so.
    log = launched.operator.get("/api/v1/audit").json()["items"]
    assert [(one["action"], one["target"]) for one in log] == [
        ("Start a sweep", f"/experiments/{first.json()['experiment']}")
    ]


def test_a_sweep_is_stopped_as_a_whole(launched: Any) -> None:
    alone = launched.start()
    sweep = launched.operator.post("/api/v1/sweeps", json=SWEEP).json()
    ended = sweep["runs"][0]["uid"]
    assert launched.operator.post(f"/api/v1/runs/{ended}/stop").status_code == 200
    stop = f"/api/v1/sweeps/{sweep['experiment']}/stop"
    assert launched.operator.post(stop).json() == {"runs": 5}
    assert launched.operator.post(stop).json() == {"runs": 0}
    assert {run["status"] for run in runs_of(launched, experiment="lr-and-seed")} == {"stopped"}
    assert launched.viewer.get(f"/api/v1/runs/{alone['uid']}").json()["status"] == "queued"
    assert launched.operator.post("/api/v1/sweeps/12345/stop").status_code == 404
