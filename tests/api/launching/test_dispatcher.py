"""The dispatcher on real SQLite, turn by turn: the queue, the ends of runs, restarts, clusters that go away."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from launch_service import launch_service
from sqlalchemy import select, update

from rhyme_openrlhf.api.launch_file import token_path
from rhyme_openrlhf.api.models import Attempt, Token
from rhyme_openrlhf.api.queueing import Job


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
    secret = token_path(launched.launching.data, attempt_of(run)).read_text()
    headers = {"Authorization": f"Bearer {secret}"}
    assert not any(secret in word for word in launched.cluster.argv[attempt_of(run)])
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
    assert not token_path(launched.launching.data, attempt_of(run)).exists()


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
        assert shown["status"] == "failed" and shown["message"] == "the run asks for 10 GPUs, the cluster has 8"
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
    with launched.service.database.reading() as session:
        tokens = session.scalars(select(Token).where(Token.name == f"attempt {attempt_of(run)}")).all()
    assert sorted(token.revoked_at is None for token in tokens) == [False, True]


def test_a_job_that_ray_never_takes_fails(launched: Any) -> None:
    launched.cluster.forgets = True
    run = launched.start()
    for _ in range(70):
        launched.turn()
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
