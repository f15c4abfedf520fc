"""A real Ray head on this machine, its Jobs API, and the dispatcher with jobs of a line: about a minute."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rhyme_openrlhf.api.launch import local_cluster
from rhyme_openrlhf.api.launch.dispatcher import Dispatcher
from rhyme_openrlhf.api.launch.lease import Candidate, Lease
from rhyme_openrlhf.api.launch.local_cluster import (
    HOST,
    LOG_FILE,
    PRETENDED_GPUS,
    STATE_FILE,
    TOKEN_FILE,
    LocalCluster,
    LocalClusterError,
    start_local_cluster,
)
from rhyme_openrlhf.api.launch.queueing import Job
from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable, RayLauncher, taken_gpus
from tests.api.launch_service import launch_service

pytest.importorskip("ray")

BUSY = "exec {python} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)' # {{attempt}}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def cluster(data: Path, starts_ray: None) -> Iterator[LocalCluster]:
    # Another test may have connected this process to a cluster.
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    with pytest.MonkeyPatch.context() as patch, socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        choose = local_cluster._free_ports
        taken = [other.getsockname()[1]]
        patch.setattr(local_cluster, "_free_ports", lambda n: [taken.pop(), *choose(n - 1)] if taken else choose(n))
        started = start_local_cluster(data)
    yield started
    started.stop()


def head_of(data: Path) -> psutil.Process:
    return psutil.Process(int(json.loads((data / STATE_FILE).read_text())["pid"]))


def launcher(cluster: LocalCluster, command: str) -> RayLauncher:
    return RayLauncher(cluster.address, cluster.token, command)


def until(what: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)
    return found


def ended(jobs: RayLauncher, attempt: str) -> Job:
    return until(lambda: (job := jobs.job(attempt)) and job.state not in ("pending", "running") and job, 150)


def process_of(jobs: RayLauncher, attempt: str) -> int:
    """The number that a BUSY job printed, or 0."""
    lines = jobs.log_tail(attempt).splitlines()
    return int(lines[-1]) if lines and lines[-1].isdigit() else 0


def folder(path: Path) -> Path:
    (path / "spec.json").write_text("{}")
    return path


def test_nothing_listens_for_other_machines_and_the_token_is_private(cluster: LocalCluster, data: Path) -> None:
    head = head_of(data)
    addresses = {
        connection.laddr.ip
        for process in [head, *head.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses and addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert (data / TOKEN_FILE).stat().st_mode & 0o077 == 0
    with pytest.raises(ClusterUnreachable, match="refuse"):
        RayLauncher(cluster.address, "wrong").gpus()
    with pytest.raises(ClusterUnreachable):
        RayLauncher(cluster.address).gpus()


def test_its_server_for_ray_client_does_not_end_where_the_node_is_late(cluster: LocalCluster, data: Path) -> None:
    (command,) = [line for one in head_of(data).children() if "ray.util.client.server" in (line := one.cmdline())]
    (agent,) = [part for part in command if part.startswith("--runtime-env-agent-address=")]
    assert int(agent.rpartition(":")[2]) > 0  # with 0, it asks the node, for at most 30 s


def test_ports_are_free_different_and_given_to_no_one_who_asks_for_any(
    monkeypatch: pytest.MonkeyPatch, starts_listener: None
) -> None:
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = local_cluster._free_ports(6)
    assert len(set(ports)) == 6 and all(20_000 <= port < below for port in ports)
    with socket.socket() as other:
        other.bind((HOST, ports[0]))
        monkeypatch.setattr(local_cluster, "PORTS", range(ports[0], ports[0] + 1))
        assert local_cluster._free_ports(1) == []


def test_another_process_took_a_port_and_ray_is_started_again(cluster: LocalCluster, data: Path) -> None:
    assert "already occupied" in (data / LOG_FILE).read_text()
    assert cluster.launcher().gpus()


def test_ray_that_ends_when_its_node_is_up_has_not_started(tmp_path: Path, starts_python: None) -> None:
    """Ray does so where another process took the port of its server for Ray Client."""
    program = "import sys; sys.stdin.read(); raise SystemExit(1)"
    asked: list[float] = []

    def gpus() -> int:
        asked.append(time.monotonic())
        if len(asked) == 2:
            ray.communicate(b"")
        return PRETENDED_GPUS

    responds: Any = SimpleNamespace(launcher=lambda: SimpleNamespace(gpus=gpus))
    with (
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as ray,
        pytest.raises(LocalClusterError, match=r"ended with code 1 at its start: see .*ray\.log"),
    ):
        local_cluster._wait(ray, responds, tmp_path / LOG_FILE)


def test_gpus_are_pretended(cluster: LocalCluster) -> None:
    assert cluster.launcher().gpus() == PRETENDED_GPUS


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0.0/4.0 CPU\n0B/2.00GiB memory\n0.0/8.0 GPU", 0),
        ("1.0/4.0 CPU\n2.5/8.0 GPU\n0.0/1.0 accelerator_type:H200", 2.5),
        ("2.0/8.0 GPU (1.0 used of 3.0 reserved in placement groups)\n0.0/4.0 CPU", 4),
        ("0.0/4.0 CPU\n0.0/1.0 GPU_like", 0),
    ],
)
def test_what_is_reserved_is_taken(text: str, gpus: float) -> None:
    assert taken_gpus(text) == gpus


HOLD = """
import ray, time
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
ray.init()
group = ray.util.placement_group([{"GPU": 1}, {"GPU": 1}])
ray.get(group.ready())
# The group has no CPU to give.
@ray.remote(num_gpus=1, num_cpus=0)
class Holder:
    pass
inside = Holder.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()
beside = Holder.remote()
ray.get([inside.__ray_ready__.remote(), beside.__ray_ready__.remote()])
print("held", flush=True)
time.sleep(600)
"""


def test_gpus_that_a_job_has_or_reserves_are_used(cluster: LocalCluster, tmp_path: Path) -> None:
    assert cluster.launcher().used_gpus() == 0
    program = tmp_path / "hold.py"
    program.write_text(HOLD)
    (tmp_path / "upload").mkdir()
    attempt = "a5" * 8
    jobs = launcher(cluster, f"exec {sys.executable} {program} {{attempt}}")
    jobs.submit(attempt, folder(tmp_path / "upload"), "token")
    until(lambda: "held" in jobs.log_tail(attempt), 120)
    until(lambda: jobs.used_gpus() == 3)
    jobs.stop(attempt)
    ended(jobs, attempt)
    until(lambda: jobs.used_gpus() == 0)


def test_a_job_runs_in_a_folder_with_its_file_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    jobs = launcher(
        cluster,
        f'{sys.executable} -c \'import os; print(os.listdir(), os.environ["RHYME_CONTROL_TOKEN"], '
        'os.environ["RAY_ADDRESS"])\' {attempt}',
    )
    attempt = "a1" * 8
    assert jobs.job(attempt) == Job("missing")
    jobs.submit(attempt, folder(tmp_path), "token")
    jobs.submit(attempt, tmp_path, "another")  # nothing twice
    assert ended(jobs, attempt).state == "succeeded"
    assert "['spec.json'] token 127.0.0.1:" in jobs.log_tail(attempt)
    jobs.delete(attempt)
    assert jobs.job(attempt) == Job("missing")


def test_the_real_entrypoint_is_found_and_refuses_a_bad_file(cluster: LocalCluster, tmp_path: Path) -> None:
    attempt = "a2" * 8
    jobs = cluster.launcher()
    jobs.submit(attempt, folder(tmp_path), "token")
    job = ended(jobs, attempt)
    assert (job.state, job.exit_code) == ("failed", 2)
    assert "the run cannot be started: spec.json" in job.message


CONNECT = """
from rhyme_openrlhf.platform import run_has_gpus, shims
shims.install()
assert not run_has_gpus()
import ray
from rhyme_openrlhf.platform.local_ray import start_local_ray
# The job sets the second variable, too, as `ray job submit --runtime-env-json` may.
context = start_local_ray(3, 12, {"A_VARIABLE": "set", "RAY_JOB_STOP_WAIT_TIME_S": "1"}, False)
@ray.remote(num_gpus=1)
def asked():
    import os
    return os.environ["A_VARIABLE"], os.environ["DS_ACCELERATOR"]
print(ray.get(asked.remote(), timeout=120), int(ray.cluster_resources()["GPU"]))
"""


def test_a_run_in_a_job_connects_and_pretends(cluster: LocalCluster, tmp_path: Path) -> None:
    """What `rhyme train` does with Ray, without a run: both of its connections, its environment, its setup hook."""
    pytest.importorskip("torch")
    from rhyme_openrlhf.platform import gpu_present

    if gpu_present():
        pytest.skip("only without a GPU")
    program = tmp_path / "connect.py"
    program.write_text(CONNECT)
    attempt = "a4" * 8
    jobs = launcher(cluster, f"{sys.executable} {program} {{attempt}}")
    (tmp_path / "upload").mkdir()
    jobs.submit(attempt, folder(tmp_path / "upload"), "token")
    job = ended(jobs, attempt)
    assert job.state == "succeeded", job.message
    assert f"('set', 'cpu') {PRETENDED_GPUS}" in jobs.log_tail(attempt)


def test_a_stop_ends_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    attempt = "a3" * 8
    jobs = launcher(cluster, BUSY.format(python=sys.executable))
    jobs.submit(attempt, folder(tmp_path), "token")
    until(lambda: process_of(jobs, attempt))
    jobs.stop(attempt)
    assert ended(jobs, attempt).state == "stopped"


def test_a_killed_job_is_crashed_within_a_minute(cluster: LocalCluster, tmp_path: Path) -> None:
    with launch_service(tmp_path) as service:
        jobs = launcher(cluster, BUSY.format(python=sys.executable))
        launching = dataclasses.replace(service.launching, launcher=jobs)
        lease = Lease(service.service.database, Candidate("ab" * 8, True))
        forget = service.service.callers.forget
        dispatcher = Dispatcher(service.service.database, launching, lease, lambda run: None, forget)
        dispatcher.start()
        run = service.start()
        attempt = run["attempts"][0]["uid"]
        until(lambda: jobs.job(attempt).state == "running" and process_of(jobs, attempt))
        service.started(run)
        os.kill(process_of(jobs, attempt), signal.SIGKILL)
        until(lambda: service.run(run["uid"])["status"] == "crashed", 60)
        assert service.run(run["uid"])["message"] == "its process was ended by signal 9"
        dispatcher.stop()


def test_the_next_service_takes_the_cluster_over(cluster: LocalCluster, data: Path) -> None:
    again = start_local_cluster(data)
    assert again.adopted and again.address == cluster.address


def test_another_cluster_in_the_environment_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(LocalClusterError, match="RAY_ADDRESS is set"):
        start_local_cluster(tmp_path)
    with pytest.raises(ClusterUnreachable, match="RAY_ADDRESS is set for the service"):
        RayLauncher("http://127.0.0.1:1").gpus()


def test_stopping_leaves_no_process(cluster: LocalCluster, data: Path) -> None:
    head = head_of(data)
    everything = [head, *head.children(recursive=True)]
    cluster.stop()
    assert not [process for process in everything if process.is_running() and process.status() != "zombie"]
    assert not (data / STATE_FILE).exists()
    with pytest.raises(ClusterUnreachable):
        cluster.launcher().gpus()
