"""Rows of a stopped and resumed run on both databases: attempts, raw events, and each step once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.api.launch.queueing import Job
from tests.api.launch_service import launch_service


@pytest.fixture(params=["sqlite", "postgresql"])
def launched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A service that starts runs on a store of each kind."""
    url = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else ""
    with launch_service(tmp_path, database=url) as service:
        yield service


def step(launched: Any, run: dict[str, Any], sequence: int, number: int, reward: float) -> None:
    fields = {"step": number, "epoch": 1, "seconds_by_part": {"train": 1.0}, "metrics": {"reward": reward}}
    launched.report(run, "train_step", sequence, **fields)


def test_a_resumed_run_has_two_attempts_and_each_step_once(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    first = run["attempts"][0]["uid"]
    launched.cluster.jobs[first] = Job("running")
    launched.started(run)
    for number in (1, 2, 3):
        step(launched, run, number, number, 0.1)
    launched.operator.post(f"/api/v1/runs/{run['uid']}/stop")
    launched.report(run, "run_finished", 4, status="stopped", message="stopped on request", seconds=1.0)
    launched.cluster.jobs[first] = Job("succeeded", "", 0)
    launched.turn()
    stopped = launched.run(run["uid"])
    assert (stopped["status"], stopped["step"], len(stopped["attempts"])) == ("stopped", 3, 1)

    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/resume").json()["status"] == "queued"
    launched.turn()
    second = launched.run(run["uid"])["attempts"][1]["uid"]
    assert launched.cluster.submitted == [first, second]
    launched.cluster.jobs[second] = Job("running")
    launched.started(run)
    assert launched.run(run["uid"])["status"] == "running"
    # From the checkpoint of step 2.
    for sequence, number in ((1, 3), (2, 4)):
        step(launched, run, sequence, number, 0.5)
    launched.report(run, "run_finished", 3, status="succeeded", message="", seconds=1.0)
    launched.cluster.jobs[second] = Job("succeeded", "", 0)
    for _ in range(15):
        launched.turn()

    shown = launched.run(run["uid"])
    assert (shown["status"], shown["step"], shown["finished_at"]) == ("succeeded", 4, 4.0)
    assert [(one["number"], one["status"], one["resumes"]) for one in shown["attempts"]] == [
        (1, "stopped", False),
        (2, "succeeded", True),
    ]
    rows = launched.viewer.get(f"/api/v1/runs/{run['uid']}/steps").json()["items"]
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.1), (2, 0.1), (3, 0.5), (4, 0.5)]
    events = launched.viewer.get(f"/api/v1/runs/{run['uid']}/events", params={"limit": 100}).json()["items"]
    kinds = {number: [one["kind"] for one in events if one["attempt"] == number] for number in (1, 2)}
    assert kinds[1] == ["run_started", *["train_step"] * 3, "run_finished"]
    assert kinds[2] == ["run_started", *["train_step"] * 2, "run_finished"]
    # Nothing of the first attempt is watched or submitted again by a service that knows nothing.
    launched.restart()
    launched.turn()
    assert launched.cluster.submitted == [first, second] and launched.dispatcher.active() == 0
