"""Starting, stopping, resuming and cloning over HTTP; keys that make one run, however often and fast they come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = {"name": "first", "command": "rhyme demo", "tags": ["b", "a"], "experiment": "ablation"}


def errors(answer: Any) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    return {one["field"]: one["message"] for one in answer.json()["errors"]}


def test_a_run_is_queued_with_everything_it_was_started_with(launched: Any) -> None:
    run = launched.operator.post("/api/v1/runs", json={**SPEC, "arguments": {"train": {"num_episodes": 2}}}).json()
    assert (run["status"], run["name"], run["origin"]) == ("queued", "first", "launched")
    assert (run["tags"], run["experiment"], run["created_by"]) == (["a", "b"], "ablation", "operator")
    assert run["spec"]["arguments"]["train"]["num_episodes"] == 2
    assert run["command"][:2] == ["rhyme", "train"] and "--train.num_episodes=2" in run["command"]
    (attempt,) = run["attempts"]
    assert attempt["submission_id"] == attempt["uid"] and attempt["run_directory"].endswith("/attempt-1")


def test_faults_come_field_by_field_and_nothing_is_made(launched: Any) -> None:
    found = errors(
        launched.operator.post(
            "/api/v1/runs",
            json={
                **SPEC,
                "arguments": {
                    "histospec": {"window_max": 1000},
                    "reward": {"remote_url": "/etc/passwd"},
                    "run": {"dir": "/tmp"},
                },
            },
        )
    )
    assert set(found) == {
        "body.arguments.histospec.window_max",
        "body.arguments.reward.remote_url",
        "body.arguments.run.dir",
    }
    assert errors(launched.operator.post("/api/v1/runs", json={"command": "rm -rf /"}))["body.command"]
    assert errors(launched.operator.post("/api/v1/runs", json={"nam": "x"}))
    assert launched.viewer.get("/api/v1/runs").json()["items"] == []


def test_a_key_makes_one_run(launched: Any) -> None:
    def post(key: str, **body: Any) -> Any:
        return launched.operator.post("/api/v1/runs", json={**SPEC, **body}, headers={"Idempotency-Key": key})

    first, again, other, fresh = post("k1"), post("k1"), post("k1", name="other"), post("k2")
    assert (first.status_code, again.status_code, other.status_code, fresh.status_code) == (201, 200, 409, 201)
    assert first.json()["uid"] == again.json()["uid"] != fresh.json()["uid"]
    assert post("a b").status_code == 422


def test_a_race_with_one_key_makes_one_run(launched: Any) -> None:
    def post(number: int) -> Any:
        key = {"Idempotency-Key": f"key-{number % 4}"}
        return launched.operator.post("/api/v1/runs", json=SPEC, headers=key)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(post, range(64)))
    assert {one.status_code for one in answers} <= {200, 201}
    assert sum(one.status_code == 201 for one in answers) == 4
    assert len({one.json()["uid"] for one in answers}) == 4
    assert len(launched.viewer.get("/api/v1/runs").json()["items"]) == 4


def test_a_queued_run_stops_at_once_and_only_once(launched: Any) -> None:
    run = launched.start()
    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/stop").json()["status"] == "stopped"
    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/stop").status_code == 409
    launched.turn()
    assert launched.cluster.submitted == []


def test_a_run_that_succeeded_is_not_resumed(launched: Any) -> None:
    run = launched.start()
    launched.turn()
    launched.started(run)
    launched.report(run, "run_finished", 1, status="succeeded", message="", seconds=1.0)
    launched.turn()
    answer = launched.operator.post(f"/api/v1/runs/{run['uid']}/resume")
    assert answer.status_code == 409
    assert (
        answer.json()["detail"] == "the run succeeded and has no steps left: clone it to continue with other settings"
    )
    assert len(launched.run(run["uid"])["attempts"]) == 1


def test_a_run_that_ended_is_resumed_by_a_new_attempt(launched: Any) -> None:
    run = launched.start()
    assert launched.operator.post(f"/api/v1/runs/{run['uid']}/resume").status_code == 409
    launched.operator.post(f"/api/v1/runs/{run['uid']}/stop")
    resumed = launched.operator.post(f"/api/v1/runs/{run['uid']}/resume").json()
    assert (resumed["status"], resumed["finished_at"], resumed["message"]) == ("queued", None, "")
    first, second = resumed["attempts"]
    assert (second["number"], second["resumes"], first["status"]) == (2, True, "stopped")
    assert first["checkpoint_path"] == second["checkpoint_path"]
    assert first["run_directory"] != second["run_directory"]
    launched.turn()
    assert "--ckpt.load_enable" in launched.cluster.argv[second["uid"]]
    assert f"--ckpt.path={second['checkpoint_path']}" in launched.cluster.argv[second["uid"]]


def test_a_resume_with_a_key_happens_once(launched: Any) -> None:
    run = launched.operator.post("/api/v1/runs", json=SPEC).json()
    path, key = f"/api/v1/runs/{run['uid']}", {"Idempotency-Key": "one"}
    for attempts in (2, 2):
        launched.operator.post(f"{path}/stop")
        answer = launched.operator.post(f"{path}/resume", headers=key)
        assert answer.status_code == 200 and len(answer.json()["attempts"]) == attempts
    again = launched.operator.post(f"{path}/resume", headers={"Idempotency-Key": "two"})
    assert len(again.json()["attempts"]) == 3


def test_logs_and_records_of_runs_that_were_started_here_can_be_read_whatever_the_roots(launched: Any) -> None:
    run = launched.start()
    directory = Path(run["attempts"][0]["run_directory"])
    assert not directory.is_relative_to(launched.root) and directory.is_relative_to(launched.launching.data)
    (directory / "logs").mkdir(parents=True)
    (directory / "logs" / "driver.log").write_text("loading\n")
    at = f"/api/v1/runs/{run['uid']}/attempts/1/logs"
    assert [file["name"] for file in launched.viewer.get(at).json()] == ["driver.log"]
    assert launched.viewer.get(f"{at}/driver.log").json()["text"] == "loading\n"
    # Refused for what it lacks, not for where it is; the rest of the service's own directory stays closed.
    answer = launched.operator.post("/api/v1/imports", json={"directory": str(directory)})
    assert answer.status_code == 422 and "config.json" in answer.json()["detail"]
    answer = launched.operator.post("/api/v1/imports", json={"directory": str(launched.launching.data)})
    assert answer.json()["errors"][0]["field"] == "body.directory"


def test_a_clone_has_edits_a_parent_and_its_own_checkpoints(launched: Any) -> None:
    run = launched.start(experiment="ablation")
    at = f"/api/v1/runs/{run['uid']}/clone"
    edits = {"histospec": {"enable": False}, "train": {"num_episodes": None}}
    clone = launched.operator.post(at, json={"edits": edits, "name": "without"}).json()
    assert (clone["parent"], clone["name"], clone["experiment"]) == (run["uid"], "without", "ablation")
    assert clone["spec"]["arguments"]["histospec"] == {"enable": False}
    assert "num_episodes" not in clone["spec"]["arguments"]["train"]
    assert clone["attempts"][0]["checkpoint_path"] != run["attempts"][0]["checkpoint_path"]
    assert errors(launched.operator.post(at, json={"edits": {"histospec": {"window_max": 0}}}))
    named = launched.start(arguments={"ckpt": {"path": str(launched.root / "mine")}})
    at = f"/api/v1/runs/{named['uid']}/clone"
    assert "body.edits.ckpt.path" in errors(launched.operator.post(at, json={}))
    assert launched.operator.post(at, json={"edits": {"ckpt": {"path": None}}}).status_code == 201
    assert launched.operator.post("/api/v1/runs/0123456789abcdef/clone", json={}).status_code == 404


def test_a_clone_has_a_name_of_its_own(launched: Any) -> None:
    def cloned(uid: str, **more: Any) -> dict[str, Any]:
        return launched.operator.post(f"/api/v1/runs/{uid}/clone", json=more).json()

    first = launched.start("demo")
    clones = [cloned(first["uid"]) for _ in range(3)]
    assert [one["name"] for one in clones] == ["demo-clone", "demo-clone-2", "demo-clone-3"]
    assert all(one["spec"]["name"] == one["name"] for one in clones)
    assert cloned(clones[1]["uid"])["name"] == "demo-clone-4"
    assert cloned(first["uid"], name="demo")["name"] == "demo"
    # A retry with its key is the same clone, and names are as long as they may be.
    retried = [
        launched.operator.post(f"/api/v1/runs/{first['uid']}/clone", json={}, headers={"Idempotency-Key": "k"}).json()
        for _ in range(2)
    ]
    assert retried[0]["uid"] == retried[1]["uid"]
    longest = launched.start("x" * 100)
    assert [cloned(longest["uid"])["name"] for _ in range(2)] == ["x" * 80 + "-clone", "x" * 80 + "-clone-2"]


def test_a_run_that_was_reported_is_cloned_from_its_command(launched: Any) -> None:
    command = ["rhyme", "train", *launched.start()["command"][2:], "--run.dir=/x", "--control.url=http://127.0.0.1:1"]
    body = {"run": "ab" * 8, "name": "a b", "run_directory": "/x", "config": {"command": command}}
    assert launched.operator.put(f"/api/v1/ingest/attempts/{'cd' * 8}", json=body).status_code == 200
    assert launched.operator.post(f"/api/v1/runs/{'ab' * 8}/resume").status_code == 409
    clone = launched.operator.post(f"/api/v1/runs/{'ab' * 8}/clone", json={})
    assert clone.status_code == 201, clone.text
    assert "run" not in clone.json()["spec"]["arguments"] and clone.json()["parent"] == "ab" * 8


def test_every_option_is_listed(launched: Any) -> None:
    listed = launched.viewer.get("/api/v1/schema").json()
    by_flag = {one["flag"]: one for one in listed["options"]}
    assert listed["openrlhf"] == "0.11.2"
    assert by_flag["--histospec.window_max"]["allowed"] == "a whole number from 1 to 128"
    assert by_flag["--run.dir"]["refused"] and by_flag["--reward.remote_url"]["path"] == "reward"


def test_specs_are_checked_and_turned_into_commands(launched: Any) -> None:
    good = launched.viewer.post("/api/v1/specs/validate", json={"command": "rhyme demo"}).json()
    assert good["valid"] and good["gpus"] == 3
    back = launched.viewer.post("/api/v1/specs/command", json={"command": good["command"]}).json()
    assert back["name"] == "demo" and back["arguments"] == good["arguments"]
    again = launched.viewer.post("/api/v1/specs/command", json={"name": "demo", "arguments": back["arguments"]}).json()
    assert again == back
    # `rhyme train` knows no uids.
    named = {"name": "demo", "arguments": {**back["arguments"], "history": {"earlier": "0123456789abcdef"}}}
    for answer in ("validate", "command"):
        said = launched.viewer.post(f"/api/v1/specs/{answer}", json=named).json()
        assert "/runs/0123456789abcdef" in said["command"]
        assert said["arguments"]["history"] == named["arguments"]["history"]
    bad = launched.viewer.post("/api/v1/specs/validate", json={"arguments": {"vllm": {"num_engines": 0}}}).json()
    assert not bad["valid"] and bad["errors"][0]["allowed"] == "a whole number at least 1"
    assert launched.viewer.post("/api/v1/specs/command", json={"command": "ls"}).status_code == 422


def test_a_service_without_a_cluster_starts_nothing_and_says_so(launched: Any) -> None:
    launched.operator.app.state.launching = None
    assert launched.viewer.post("/api/v1/specs/validate", json={"command": "rhyme demo"}).json()["valid"]
    answer = launched.operator.post("/api/v1/runs", json=SPEC)
    assert answer.status_code == 409 and "without a Ray cluster" in answer.json()["detail"]


def test_what_the_job_printed_is_shown_even_without_a_run_directory(launched: Any) -> None:
    run = launched.start()
    at = f"/api/v1/runs/{run['uid']}/attempts"
    launched.cluster.logs[run["attempts"][0]["uid"]] = "rhyme train: error: no such model\n"
    assert "no such model" in launched.viewer.get(f"{at}/1/job-log").json()["text"]
    assert launched.viewer.get(f"{at}/2/job-log").status_code == 404
    launched.cluster.reachable = False
    assert launched.viewer.get(f"{at}/1/job-log").status_code == 503
