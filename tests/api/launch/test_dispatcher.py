"""The dispatcher on real SQLite, turn by turn: the queue, the ends of runs, restarts, clusters that go away."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from rhyme_openrlhf.api.launch.lease import LeaseLost
from rhyme_openrlhf.api.launch.queueing import Job
from rhyme_openrlhf.api.store.models import Attempt, Token
from tests.api.launch_service import Cluster, launch_service


def attempt_of(run: dict[str, Any]) -> str:
    return str(run["attempts"][-1]["uid"])


def test_a_run_from_queue_to_success(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    uid = attempt_of(run)
    assert launched.run(run["uid"])["status"] == "starting" and launched.cluster.submitted == [uid]
    argv = launched.cluster.argv[uid]
    assert f"--run.dir={run['attempts'][0]['run_directory']}" in argv
    assert "--control.url=http://127.0.0.1:8420" in argv and "--ckpt.load_enable" not in argv
    launched.cluster.jobs[uid] = Job("running")
    launched.turn()
    launched.started(run)
    assert launched.run(run["uid"])["status"] == "running"
    launched.report(run, "run_finished", 1, status="succeeded", message="", seconds=1.0)
    launched.cluster.jobs[uid] = Job("succeeded", "", 0)
    for _ in range(20):
        launched.turn()
    assert launched.run(run["uid"])["status"] == "succeeded" and launched.cluster.submitted == [uid]


def test_the_reporters_token_is_its_runs_alone_and_in_no_argv(launched: Any) -> None:
    run, other = launched.start(), launched.start()
    launched.turn()
    (secret,) = launched.cluster.tokens[attempt_of(run)]
    headers = {"Authorization": f"Bearer {secret}"}
    assert not any(secret in word for word in launched.cluster.argv[attempt_of(run)])
    # The cluster may see no file of the service.
    assert not any(secret.encode() in file.read_bytes() for file in launched.launching.data.rglob("*.json"))
    at = "/api/v1/ingest/attempts/{}/batches"
    own = launched.operator.post(at.format(attempt_of(run)), json={"events": []}, headers=headers)
    foreign = launched.operator.post(at.format(attempt_of(other)), json={"events": []}, headers=headers)
    assert (own.status_code, foreign.status_code) == (200, 403)
    # Long after the end it opens nothing any more.
    launched.cluster.jobs[attempt_of(run)] = Job("failed", "", -9)
    for _ in range(15):
        launched.turn()
    assert launched.run(run["uid"])["status"] == "crashed"
    # By a clock that only goes forward: one that is set ends no reporter's work.
    with launched.service.database.writing() as session:
        session.execute(update(Attempt).where(Attempt.uid == attempt_of(run)).values(finished_at=time.time() - 7200))
    for _ in range(31):
        launched.turn()
    assert launched.operator.post(at.format(attempt_of(run)), json={"events": []}, headers=headers).status_code == 200
    launched.now += 7200
    for _ in range(31):
        launched.turn()
    assert launched.operator.post(at.format(attempt_of(run)), json={"events": []}, headers=headers).status_code == 401


def test_a_killed_run_is_crashed_within_a_minute(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    launched.cluster.jobs[attempt_of(run)] = Job("running")
    launched.started(run)
    launched.cluster.jobs[attempt_of(run)] = Job("failed", "Killed", -9)
    killed = launched.now
    while launched.run(run["uid"])["status"] == "running":
        launched.turn()
        assert launched.now - killed < 60
    shown = launched.run(run["uid"])
    assert (shown["status"], shown["message"]) == ("crashed", "its process was ended by signal 9")
    assert shown["finished_at"] is not None


def test_a_stop_is_told_to_the_reporter_first_and_forced_after_the_grace_time(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    launched.cluster.jobs[attempt_of(run)] = Job("running")
    launched.started(run)
    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/stop").json()["status"] == "stopping"
    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/stop").status_code == 200
    assert launched.report(run, "note", 1, level="info", text="still here")
    launched.turn()
    launched.turn(590)
    assert launched.cluster.stopped == []
    launched.turn(20)
    assert launched.cluster.stopped == [attempt_of(run)]
    for _ in range(15):
        launched.turn()
    shown = launched.run(run["uid"])
    assert shown["status"] == "stopped" and "Ray stopped its job" in shown["message"]
    assert launched.cluster.stopped == [attempt_of(run)]


def test_a_run_that_stops_by_itself_is_not_forced(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    launched.cluster.jobs[attempt_of(run)] = Job("running")
    launched.started(run)
    launched.operator.post(f"/api/v1/runs/{run['uid']}/stop")
    launched.report(run, "run_finished", 1, status="stopped", message="stopped on request", seconds=1.0)
    launched.cluster.jobs[attempt_of(run)] = Job("succeeded", "", 0)
    launched.turn(1000)
    shown = launched.run(run["uid"])
    assert (shown["status"], shown["message"]) == ("stopped", "stopped on request")
    assert launched.cluster.stopped == []


def test_the_queue_keeps_to_its_limits(tmp_path: Path) -> None:
    with launch_service(tmp_path, max_runs=2) as launched:
        runs = [launched.start(f"r{number}") for number in range(4)]
        huge = launched.start("huge", arguments={"vllm": {"num_engines": 9}})
        launched.turn()
        assert launched.cluster.submitted == [attempt_of(run) for run in runs[:2]]
        shown = launched.run(huge["uid"])
        assert shown["status"] == "failed" and shown["message"] == "the run needs 10 GPUs, the cluster has 8"
        launched.cluster.jobs[attempt_of(runs[0])] = Job("failed", "", -9)
        for _ in range(15):
            launched.turn()
        assert launched.cluster.submitted == [attempt_of(run) for run in runs[:3]]
        launched.cluster.total_gpus = 7
        launched.cluster.jobs[attempt_of(runs[1])] = Job("failed", "", -9)
        for _ in range(15):
            launched.turn()
        assert launched.cluster.submitted == [attempt_of(run) for run in runs]


def test_gpus_of_other_jobs_are_not_given_away(launched: Any) -> None:
    cluster = launched.cluster
    cluster.others_gpus = 7
    first, second = launched.start("first"), launched.start("second")
    launched.turn()
    assert cluster.submitted == [] and launched.run(first["uid"])["status"] == "queued"
    # Each of the two asks for three.
    cluster.others_gpus = 3
    launched.turn()
    assert cluster.submitted == [attempt_of(first)]
    # What the first one takes is not taken for others'.
    cluster.jobs[attempt_of(first)] = Job("running")
    launched.started(first)
    cluster.taken_gpus = 3
    launched.turn()
    assert cluster.submitted == [attempt_of(first)]
    cluster.others_gpus = 2
    launched.turn()
    assert cluster.submitted == [attempt_of(first), attempt_of(second)]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_submission_that_nobody_answered_is_made_again_and_once(launched: Any, restarted: bool) -> None:
    run = launched.start()
    launched.turn()
    # As if the service, or Ray, had gone between the row and the job.
    launched.cluster.jobs.clear()
    if restarted:
        launched.restart()
    launched.turn()
    assert launched.cluster.submitted == [attempt_of(run)] * 2
    launched.turn()
    assert len(launched.cluster.submitted) == 2 and launched.run(run["uid"])["status"] == "starting"
    # Ray may have taken either try, whose token the run then has.
    for secret in launched.cluster.tokens[attempt_of(run)]:
        batches = f"/api/v1/ingest/attempts/{attempt_of(run)}/batches"
        headers = {"Authorization": f"Bearer {secret}"}
        assert launched.operator.post(batches, json={"events": []}, headers=headers).status_code == 200
    assert len(set(launched.cluster.tokens[attempt_of(run)])) == 2


def test_a_job_that_ray_never_takes_fails(launched: Any) -> None:
    launched.cluster.forgets = True
    run = launched.start()
    for _ in range(14):
        launched.turn(10)
    assert launched.run(run["uid"])["status"] == "failed"


def test_what_ray_refuses_fails_with_its_words(launched: Any) -> None:
    launched.cluster.refuses = "runtime_env is not allowed here"
    run = launched.start()
    launched.turn()
    assert launched.run(run["uid"])["message"] == "it could not be started: runtime_env is not allowed here"


def test_a_path_that_was_turned_since_fails_before_ray_is_asked(launched: Any) -> None:
    reward = launched.root / "reward.py"
    reward.write_text("")
    run = launched.start(arguments={"reward": {"remote_url": str(reward)}})
    reward.unlink()
    reward.symlink_to("/etc/passwd")
    launched.turn()
    shown = launched.run(run["uid"])
    assert shown["status"] == "failed" and "below one of the service's roots" in shown["message"]
    assert launched.cluster.submitted == []


def test_lost_only_when_nobody_answers_and_found_again(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    launched.cluster.jobs[attempt_of(run)] = Job("running")
    launched.started(run)
    launched.cluster.reachable = False
    launched.turn(200)
    launched.report(run, "note", 1, level="info", text="here")
    launched.turn(200)
    assert launched.run(run["uid"])["status"] == "running"
    launched.turn(200)
    launched.turn(200)
    assert launched.run(run["uid"])["status"] == "lost"
    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/resume").status_code == 409
    launched.cluster.reachable = True
    launched.turn()
    assert launched.run(run["uid"])["status"] == "running"


def test_a_lost_run_can_be_given_up(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    launched.cluster.reachable = False
    launched.turn()
    launched.turn(400)
    assert launched.run(run["uid"])["status"] == "lost"
    launched.operator.post(f"/api/v1/runs/{run['uid']}/stop")
    launched.turn()
    assert launched.run(run["uid"])["status"] == "stopped"
    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/resume").status_code == 200


def test_a_restarted_service_takes_up_where_it_was(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    uid = attempt_of(run)
    launched.cluster.jobs[uid] = Job("running")
    launched.started(run)
    launched.restart()
    launched.now += 10_000  # away for hours: nothing is lost or crashed for that
    launched.turn()
    assert launched.run(run["uid"])["status"] == "running" and launched.cluster.submitted == [uid]
    launched.cluster.jobs[uid] = Job("failed", "", -9)
    launched.restart()
    for _ in range(15):
        launched.turn()
    assert launched.run(run["uid"])["status"] == "crashed"


def test_a_reported_run_that_falls_silent_is_lost(launched: Any) -> None:
    body = {"run": "ab" * 8, "name": "r", "run_directory": "/x", "config": {}}
    launched.operator.put(f"/api/v1/ingest/attempts/{'cd' * 8}", json=body)
    launched.turn()
    launched.turn(400)
    assert launched.run("ab" * 8)["status"] == "lost"


def test_the_thread_works_through_the_queue_and_ends(launched: Any) -> None:
    run = launched.start()
    launched.restart()
    launched.dispatcher.start()
    deadline = time.monotonic() + 20
    while launched.run(run["uid"])["status"] == "queued":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert launched.dispatcher.active() == 1
    launched.dispatcher.stop()
    assert not launched.dispatcher._thread.is_alive()


class FreezingCluster(Cluster):
    """Freezes the service that asks it to start a job: what happens meanwhile is `meanwhile`."""

    def __post_init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None

    def gpus(self) -> int:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super().gpus()


@pytest.fixture(params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A `LaunchService` on each kind of database; `another()` makes the dispatcher of a second service on it."""
    url = "" if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    with launch_service(tmp_path, database=url) as service:
        yield service


def take_over(launched: Any, dispatcher: Any) -> None:
    """Let the other dispatcher look until it has the lease."""
    for _ in range(9):
        launched.now += 2
        dispatcher.turn()


def open_tokens(launched: Any) -> int:
    with launched.service.database.reading() as session:
        names = Token.name.like("attempt %")
        return len(session.scalars(select(Token.id).where(names, Token.revoked_at.is_(None))).all())


def test_of_two_services_on_one_database_one_starts_and_the_other_queues(shared: Any, tmp_path: Path) -> None:
    said: list[str] = []
    elsewhere = Cluster()
    second = shared.another(launcher=elsewhere, cluster="another", data=tmp_path / "second")
    second._say = said.append
    shared.turn()
    second.turn()
    run = shared.start()
    for _ in range(20):
        second.turn()
        shared.turn()
    assert shared.cluster.submitted == [attempt_of(run)] and elsewhere.submitted == []
    assert open_tokens(shared) == 1
    (sentence,) = said
    assert "this service does not dispatch" in sentence and "process " in sentence
    shared.dispatcher.stop()
    later = shared.start()
    second.turn()
    assert elsewhere.submitted == [attempt_of(later)]
    assert said[1:] == ["this service dispatches now: it starts and watches the runs in its database"]


@pytest.mark.parametrize("same", [True, False])
def test_a_holder_that_freezes_while_it_starts_a_run_does_not_start_it_again(
    shared: Any, tmp_path: Path, same: bool
) -> None:
    frozen = FreezingCluster()
    elsewhere = Cluster() if not same else frozen
    shared.launching = dataclasses.replace(shared.launching, launcher=frozen)
    shared.restart()
    shared.dispatcher.turn()
    name = "" if same else "another"
    second = shared.another(launcher=elsewhere, cluster=name, data=tmp_path / "second")
    second.turn()
    run = shared.start()
    frozen.meanwhile = lambda: take_over(shared, second)
    with pytest.raises(LeaseLost):
        shared.turn()
    assert [*frozen.submitted, *(elsewhere.submitted if not same else [])] == [attempt_of(run)]
    assert open_tokens(shared) == 1
    for _ in range(20):
        second.turn()
        shared.turn()
    assert [*frozen.submitted, *(elsewhere.submitted if not same else [])] == [attempt_of(run)]


def test_a_run_of_another_cluster_is_neither_started_again_nor_ended(shared: Any, tmp_path: Path) -> None:
    begun, running = shared.start("begun"), shared.start("running")
    shared.turn()
    shared.started(running)
    elsewhere = Cluster()
    second = shared.another(launcher=elsewhere, cluster="another", data=tmp_path / "second")
    second.turn()
    take_over(shared, second)
    for _ in range(70):
        shared.now += 2
        shared.report(running, "note", int(shared.now), level="info", text="still here")
        second.turn()
    assert elsewhere.submitted == [] and elsewhere.stopped == []
    assert shared.run(begun["uid"])["status"] == "starting" and shared.run(running["uid"])["status"] == "running"
    # Its GPUs are the other cluster's: here is room.
    third = shared.start("third", arguments={"vllm": {"num_engines": 7}})
    second.turn()
    assert elsewhere.submitted == [attempt_of(third)]
    shared.now += 400
    second.turn()
    second.turn()
    assert shared.run(begun["uid"])["status"] == "lost" and open_tokens(shared) == 3


def test_a_run_is_watched_by_the_service_that_takes_over(shared: Any, tmp_path: Path) -> None:
    run = shared.start()
    shared.turn()
    shared.cluster.jobs[attempt_of(run)] = Job("running")
    shared.started(run)
    second = shared.another(data=tmp_path / "second")
    second.turn()
    take_over(shared, second)
    shared.cluster.jobs[attempt_of(run)] = Job("failed", "", -9)
    for _ in range(15):
        shared.now += 2
        second.turn()
    assert shared.run(run["uid"])["status"] == "crashed" and shared.cluster.submitted == [attempt_of(run)]


def test_a_resumed_run_finds_its_checkpoints_whichever_service_starts_it(shared: Any, tmp_path: Path) -> None:
    run = shared.start()
    shared.turn()
    shared.cluster.jobs[attempt_of(run)] = Job("failed", "", 1)
    for _ in range(15):
        shared.turn()
    shared.dispatcher.stop()
    shared.operator.post(f"/api/v1/runs/{run['uid']}/resume")
    second = shared.another(data=tmp_path / "second")
    second.turn()
    argv = [shared.cluster.argv[one["uid"]] for one in shared.run(run["uid"])["attempts"]]
    first, again = (next(word for word in words if word.startswith("--ckpt.path=")) for words in argv)
    assert first == again and "--ckpt.load_enable" in argv[1]


def test_the_api_says_which_service_starts_runs(launched: Any) -> None:
    told = launched.viewer.get("/api/v1/dispatcher").json()
    assert told["here"] is False and told["host"] is None and "no service dispatches now" in told["message"]
    launched.turn()
    told = launched.viewer.get("/api/v1/dispatcher").json()
    assert told["here"] is False and told["pid"] == os.getpid() and told["host"] == socket.gethostname()
    assert f"process {os.getpid()} on {socket.gethostname()}, since" in told["message"]
