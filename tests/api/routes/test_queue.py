"""The queue over HTTP: who waits, for what, and which service starts runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rhyme_openrlhf.api.launch.lease import Candidate, Lease
from rhyme_openrlhf.api.launch.queueing import Job

# Of `rhyme demo`: two engines and the trainer.
GPUS = 3


def queue(launched: Any) -> dict[str, Any]:
    answer = launched.viewer.get("/api/v1/queue")
    assert answer.status_code == 200, answer.text
    return answer.json()


def waiting(launched: Any) -> list[tuple[str, int, str]]:
    return [(run["name"], run["position"], run["why"]) for run in queue(launched)["waiting"]]


def test_each_waiting_run_says_what_it_waits_for(launched: Any) -> None:
    launched.cluster.total_gpus = 4
    first = launched.start("first")
    assert waiting(launched) == [("first", 1, "it starts in a moment")]
    launched.start("second")
    launched.start("third")
    launched.turn()
    shown = queue(launched)
    assert (shown["gpus"], shown["max_runs"]) == (4, launched.launching.settings.max_runs)
    (active,) = shown["active"]
    assert (active["uid"], active["gpus"], active["position"], active["why"]) == (first["uid"], GPUS, 0, "")
    assert active["status"] == "starting"
    assert waiting(launched) == [
        ("second", 1, "it needs 3 GPUs, and 1 of 4 are free"),
        ("third", 2, "runs start in order, and run 1 of the queue waits"),
    ]
    # The reasons are those by which runs start.
    launched.cluster.jobs[first["attempts"][0]["uid"]] = Job("succeeded")
    launched.turn()
    launched.turn(30.0)
    launched.turn()
    assert [run["name"] for run in queue(launched)["active"]] == ["second"]
    assert waiting(launched) == [("third", 1, "it needs 3 GPUs, and 1 of 4 are free")]


def test_a_cluster_that_does_not_respond_is_the_reason(launched: Any) -> None:
    launched.turn()
    launched.start("first")
    launched.cluster.reachable = False
    shown = queue(launched)
    assert (shown["gpus"], shown["message"]) == (None, "Ray does not respond")
    assert waiting(launched) == [("first", 1, "Ray does not respond")]


def test_a_service_without_a_cluster_says_so(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched.start("first")
    without = dataclasses.replace(launched.launching, launcher=None)
    monkeypatch.setattr(launched.viewer.app.state, "launching", without)
    shown = queue(launched)
    said = "this service cannot start runs: it was started without a Ray cluster"
    assert (shown["gpus"], shown["message"]) == (None, said)
    assert waiting(launched) == [("first", 1, said)]


def test_a_service_that_does_not_dispatch_says_so(launched: Any) -> None:
    assert queue(launched)["message"].startswith("no service dispatches now")
    own = Lease(launched.service.database, Candidate(launched.service.uid, True))
    assert own.keep() is not None
    assert queue(launched)["message"] == "" and launched.viewer.get("/api/v1/dispatcher").json()["here"]
    own.release()
    launched.turn()
    # The test's dispatcher stands for another service on the same store.
    assert queue(launched)["message"].startswith("this service does not dispatch")
    holder = launched.viewer.get("/api/v1/dispatcher").json()
    assert not holder["here"] and holder["message"] == queue(launched)["message"]
