"""Groups of an experiment's runs over HTTP, on both stores."""

from __future__ import annotations

from typing import Any

import pytest

# (learning rate, seed, shift of the rewards) of each run, which has rewards 0.51, 0.52, 0.53 and the shift.
RUNS = ((1e-6, 1, 0.0), (1e-6, 2, 0.2), (3e-6, 1, 0.1))


def uid_of(number: int) -> str:
    return f"{number:x}" * 16


@pytest.fixture
def experiment(api: Any, record: Any) -> int:
    """An experiment with the runs `RUNS`, of which the second has one step more."""
    found = api.operator.post("/api/v1/experiments", json={"name": "lr"}).json()
    for number, (lr, seed, shift) in enumerate(RUNS, start=1):
        run, attempt = uid_of(number), uid_of(number + 8)
        arguments = {"actor": {"adam": {"lr": lr}}, "train": {"seed": seed}, "ckpt": {"path": f"/{run}"}}
        api.announce(run=run, attempt=attempt, name=f"run {number}", config={"arguments": arguments})
        events = record(steps=4 if number == 2 else 3)
        for event in events:
            if event["kind"] == "train_step":
                event["metrics"]["reward"] += shift
        api.send(events, attempt=attempt)
        assert api.operator.patch(f"/api/v1/runs/{run}", json={"experiment": "lr"}).status_code == 200
    return int(found["id"])


@pytest.mark.parametrize("store", ["sqlite", "postgresql"], indirect=True)
def test_runs_that_differ_in_their_seed_are_a_group(api: Any, experiment: int) -> None:
    place = f"/api/v1/experiments/{experiment}/groups"
    found = api.viewer.get(place, params={"names": "reward,step_seconds,nothing", "points": 100}).json()
    assert [group["options"] for group in found["groups"]] == [{"actor.adam.lr": 1e-6}, {"actor.adam.lr": 3e-6}]
    two, one = found["groups"]
    assert [(run["uid"], run["seed"], run["status"]) for run in two["runs"]] == [
        (uid_of(1), 1, "succeeded"), (uid_of(2), 2, "succeeded"),
    ]  # fmt: skip
    reward, seconds, nothing = two["figures"]
    # 0.53, and 0.54 with its shift of 0.2.
    assert reward["final"] == {"runs": 2, "mean": pytest.approx(0.635), "deviation": pytest.approx(0.1485, abs=1e-4)}
    assert reward["best"] == reward["final"]
    curve = reward["curve"]
    assert curve["x"] == [1, 2, 3, 4] and curve["runs"] == [2, 2, 2, 1]
    assert curve["mean"] == pytest.approx([0.61, 0.62, 0.63, 0.74])
    assert curve["high"][0] - curve["low"][0] == pytest.approx(2 * 0.2 / 2**0.5)
    assert seconds["best"]["mean"] == pytest.approx(9.0)
    assert nothing["final"] == {"runs": 0, "mean": None, "deviation": None} and nothing["curve"]["x"] == []
    assert one["figures"][0]["final"] == {"runs": 1, "mean": pytest.approx(0.63), "deviation": None}
    assert found["truncated"] is False


def test_archived_runs_are_left_out_and_settings_are_the_newest(api: Any, experiment: int) -> None:
    place = f"/api/v1/experiments/{experiment}/groups"
    assert api.operator.post(f"/api/v1/runs/{uid_of(1)}/archive").status_code == 200
    groups = api.viewer.get(place).json()["groups"]
    assert [[run["uid"] for run in group["runs"]] for group in groups] == [[uid_of(2)], [uid_of(3)]]
    assert [figure["name"] for figure in groups[0]["figures"]] == ["reward", "tokens_per_second"]
    assert all(figure["curve"] is None for group in groups for figure in group["figures"])
    # A resumed run has other settings.
    arguments = {"actor": {"adam": {"lr": 1e-6}}, "train": {"seed": 3}}
    api.announce(run=uid_of(3), attempt=uid_of(12), name="run 3", config={"arguments": arguments})
    (both,) = api.viewer.get(place).json()["groups"]
    assert [(run["uid"], run["seed"]) for run in both["runs"]] == [(uid_of(2), 2), (uid_of(3), 3)]
    assert api.viewer.get("/api/v1/experiments/12345/groups").status_code == 404
    assert api.viewer.get(place, params={"names": ","}).status_code == 422
