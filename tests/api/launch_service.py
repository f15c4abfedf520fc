"""Helpers of launch tests: a service on a real store, and a cluster whose jobs a test controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rhyme_openrlhf.api.access.service import Service
from rhyme_openrlhf.api.app import create_app
from rhyme_openrlhf.api.launch.actions import Launching, LaunchSettings
from rhyme_openrlhf.api.launch.cluster_state import ClusterState, cluster_state
from rhyme_openrlhf.api.launch.dispatcher import Dispatcher
from rhyme_openrlhf.api.launch.job_file import read_launch_file
from rhyme_openrlhf.api.launch.lease import Candidate, Lease
from rhyme_openrlhf.api.launch.queueing import Job
from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable, SubmitRefused
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.settings.control import new_uid
from tests.stores import prepare

BASE = "http://127.0.0.1:8420"


@dataclass
class Cluster:
    """A Launcher in memory. Jobs are pending when submitted; tests set what becomes of them."""

    total_gpus: int = 8
    others_gpus: int = 0
    taken_gpus: int = 0
    reachable: bool = True
    refuses: str = ""
    forgets: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)
    argv: dict[str, list[str]] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    tokens: dict[str, list[str]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)

    def _answer(self) -> None:
        if not self.reachable:
            raise ClusterUnreachable("Ray does not respond")

    def submit(self, attempt_uid: str, folder: Path, token: str) -> None:
        self._answer()
        if self.refuses:
            raise SubmitRefused(self.refuses)
        self.submitted.append(attempt_uid)
        self.tokens.setdefault(attempt_uid, []).append(token)
        self.argv[attempt_uid] = read_launch_file(folder, attempt_uid).argv()
        if not self.forgets:
            self.jobs.setdefault(attempt_uid, Job("pending"))

    def job(self, attempt_uid: str) -> Job:
        self._answer()
        return self.jobs.get(attempt_uid, Job("missing"))

    def stop(self, attempt_uid: str) -> None:
        self._answer()
        self.stopped.append(attempt_uid)
        self.jobs[attempt_uid] = Job("stopped")

    def log_tail(self, attempt_uid: str) -> str:
        self._answer()
        return self.logs.get(attempt_uid, "")

    def delete(self, attempt_uid: str) -> None:
        self._answer()
        self.jobs.pop(attempt_uid, None)

    def gpus(self) -> int:
        self._answer()
        return self.total_gpus

    def used_gpus(self) -> int:
        self._answer()
        return self.others_gpus + self.taken_gpus

    def state(self) -> ClusterState:
        self._answer()
        total = {"GPU": float(self.total_gpus), "CPU": 24.0}
        node = {"node_id": "ab" * 28, "node_ip": "10.0.0.1", "state": "ALIVE", "is_head_node": True}
        return cluster_state([{**node, "resources_total": total}], [], None)


@dataclass
class LaunchService:
    """The service, its clients, its dispatcher (whose turns tests take), and a clock that tests set."""

    service: Service
    operator: TestClient
    viewer: TestClient
    cluster: Cluster
    launching: Launching
    root: Path
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.dispatcher = self.another()

    def restart(self) -> None:
        """A dispatcher that knows nothing, as after a restart of the service."""
        self.dispatcher.stop()
        self.dispatcher = self.another()

    def another(self, **changes: Any) -> Dispatcher:
        """The dispatcher of another service on the same store, whose `Launching` has these `changes`."""
        launching = dataclasses.replace(self.launching, **changes)
        store = self.service.database
        lease = Lease(store, Candidate(new_uid(), launching.launcher is not None), lambda: self.now)
        return Dispatcher(store, launching, lease, lambda run: None, self.service.callers.forget, lambda: self.now)

    def turn(self, seconds: float = 2.0) -> None:
        self.now += seconds
        self.dispatcher.turn()

    def start(self, name: str = "demo", **more: Any) -> dict[str, Any]:
        answer = self.operator.post("/api/v1/runs", json={"command": f"rhyme demo --run.name {name}", **more})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def run(self, uid: str) -> dict[str, Any]:
        return self.viewer.get(f"/api/v1/runs/{uid}").json()

    def report(self, run: dict[str, Any], kind: str, sequence: int = 0, **fields: Any) -> bool:
        """One event of the run's newest attempt, as its reporter sends it; whether the answer says stop."""
        attempt = self.run(run["uid"])["attempts"][-1]["uid"]
        event = {"kind": kind, "time": 1.0 + sequence, "source": "driver", "sequence": sequence, **fields}
        body = {"events": [event], "heartbeat": {"alive": True}}
        answer = self.operator.post(f"/api/v1/ingest/attempts/{attempt}/batches", json=body)
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["stop"])

    def started(self, run: dict[str, Any]) -> None:
        self.report(
            run, "run_started", schema_version=1, name="demo", command=[], engines=2, tensor_parallel_size=1, epochs=1,
            steps_per_epoch=None, prompts_per_step=1, samples_per_prompt=1, asynchronous=False,
        )  # fmt: skip


@contextmanager
def launch_service(
    tmp_path: Path, database: str = "", served: Mapping[str, Any] | None = None, **changes: Any
) -> Iterator[LaunchService]:
    """`database` is a URL, "" for SQLite; `served` are further settings of the service, `changes` launch settings."""
    root = tmp_path / "root"
    root.mkdir()
    settings = ServeSettings(data_dir=str(tmp_path / "data"), roots=str(root), database=database, **(served or {}))
    prepare(settings)
    app = create_app(settings, background=())
    cluster = Cluster()
    launching = Launching(LaunchSettings(**changes), settings.data_path(), settings.root_paths(), BASE, cluster)
    app.state.launching = launching
    with TestClient(app, base_url=BASE) as client:
        service: Service = app.state.service
        with service.database.writing() as session:
            secrets = {
                role: credentials.issue_token(session, role, role, 1.0).secret  # type: ignore[arg-type]
                for role in ("operator", "viewer")
            }

        def speaking(role: str) -> TestClient:
            one = TestClient(app, base_url=BASE, headers={"Authorization": f"Bearer {secrets[role]}"})
            # The service's own event loop: otherwise each request makes a thread with a new loop.
            one.portal = client.portal
            return one

        assert client.get("/healthz").status_code == 200
        yield LaunchService(service, speaking("operator"), speaking("viewer"), cluster, launching, root)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[LaunchService]:
    """A service with the default settings."""
    with launch_service(tmp_path) as service:
        yield service
