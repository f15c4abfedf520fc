"""Ray on this machine for `rhyme serve --local`: a head on 127.0.0.1 that wants a token, with its Jobs API.

Invariants: nothing of it listens for other machines; it is a process of its own, so a killed service leaves it and
its runs alive, and the next service with the same data directory takes it over; `stop` leaves no process of it.
Without a GPU, "GPU" is a mere scheduling resource here, as in platform/local_ray.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable, RayLauncher
from rhyme_openrlhf.run.resources import SPARE_CPUS

HOST = "127.0.0.1"
# Pretended GPUs are slots, each with a CPU slot beside it: as many as a small machine may want to try a layout with.
# What really runs beside each other is limited by the number of runs.
PRETENDED_GPUS = 8
# Enough for the sequences of small runs, as in platform/local_ray.py.
OBJECT_STORE_BYTES = 1024**3
# A busy machine takes half a minute for the head and as long for its dashboard.
START_SECONDS = 120
STOP_SECONDS = 20
# torch is imported to ask for GPUs.
GPU_QUESTION_SECONDS = 120
STATE_FILE = "ray.json"
TOKEN_FILE = "ray-token"
LOG_FILE = "ray.log"


class LocalClusterError(RuntimeError):
    """Ray does not start here; the message is one sentence for the user."""


@dataclass(frozen=True)
class _State:
    """A head that was started: its process, told from another one with the same number by when it was made."""

    pid: int
    created: float
    address: str


class LocalCluster:
    """The cluster of one data directory. `address` is its Jobs API."""

    def __init__(self, data: Path, process: psutil.Process, address: str, token: str, adopted: bool) -> None:
        self._data = data
        self._process = process
        self.address = address
        self.token = token
        self.adopted = adopted

    def launcher(self) -> RayLauncher:
        """How jobs get there."""
        return RayLauncher(self.address, self.token)

    def stop(self) -> None:
        """End the head and everything below it, at the latest after STOP_SECONDS."""
        _end(self._process)
        (self._data / STATE_FILE).unlink(missing_ok=True)


def start_local_cluster(data: Path) -> LocalCluster:
    """Start Ray, or take over what an earlier service with this data directory left running.

    Raises LocalClusterError.
    """
    if os.environ.get("RAY_ADDRESS"):
        raise LocalClusterError("RAY_ADDRESS is set: give that cluster's dashboard as --ray-address, or unset it")
    data.mkdir(parents=True, exist_ok=True)
    token = _token(data)
    left = _left_running(data, token)
    if left is not None:
        return left
    address = f"http://{HOST}:{(ports := _free_ports(5))[0]}"
    command = _command(ports, _gpus_there())
    with (data / LOG_FILE).open("ab") as log:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(data), start_new_session=True
        )
    process = psutil.Process(started.pid)
    cluster = LocalCluster(data, process, address, token, adopted=False)
    state = _State(started.pid, process.create_time(), address)
    (data / STATE_FILE).write_text(json.dumps(asdict(state)))
    up = False
    try:
        _wait(started, cluster, data / LOG_FILE)
        up = True
    finally:
        if not up:  # it failed, or somebody pressed Ctrl-C
            cluster.stop()
    return cluster


def _command(ports: list[int], gpus: bool) -> list[str]:
    dashboard, control, agent, agent_grpc, client = map(str, ports)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={HOST}", f"--port={control}", f"--ray-client-server-port={client}"]
    command += ["--include-dashboard=true", f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    command += [f"--temp-dir={_temp_dir()}"]
    if not gpus:
        cpus = PRETENDED_GPUS + SPARE_CPUS + PRETENDED_GPUS
        command += [f"--num-gpus={PRETENDED_GPUS}", f"--num-cpus={cpus}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    return command


def _environment(data: Path) -> Mapping[str, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return {
        **os.environ,
        # Jobs are started as "python ...": the one that runs here.
        "PATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(data / TOKEN_FILE),
        # Ray's only switch (meant for other systems' firewalls) that makes 127.0.0.1 the node's address; otherwise it
        # turns --node-ip-address=127.0.0.1 back into the outer one, and its control store listens for everybody.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray would start a worker for each CPU slot ahead of time, and each imports torch.
        "RAY_prestart_worker_first_driver": "0",
    }


def _temp_dir() -> Path:
    """Where Ray keeps its sessions: short, because socket paths have at most 107 characters, and this user's alone."""
    path = Path(tempfile.gettempdir()) / f"rhyme-ray-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
        raise LocalClusterError(f"{path} is not this user's alone: remove it")
    # Ray opens its own folder to everybody.
    return path / "ray"


def _token(data: Path) -> str:
    """The cluster's token; made at the first start, for this user's eyes alone."""
    path = data / TOKEN_FILE
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    # One that was copied here may be open to others.
    path.chmod(0o600)
    return path.read_text().strip()


def _left_running(data: Path, token: str) -> LocalCluster | None:
    """What an earlier service left, if it still answers; what does not is ended."""
    try:
        state = _State(**json.loads((data / STATE_FILE).read_text()))
        process = psutil.Process(state.pid)
        if process.create_time() != state.created:
            return None
    except (OSError, ValueError, TypeError, psutil.NoSuchProcess):
        return None
    cluster = LocalCluster(data, process, state.address, token, adopted=True)
    try:
        cluster.launcher().gpus()
    except ClusterUnreachable:
        cluster.stop()
        return None
    return cluster


def _wait(started: subprocess.Popen[bytes], cluster: LocalCluster, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    launcher = cluster.launcher()
    said = "its node has not come up"
    while time.monotonic() < deadline:
        if started.poll() is not None:
            raise LocalClusterError(f"Ray ended with code {started.returncode} when it was started: see {log}")
        try:
            # The dashboard answers before its node is there.
            if launcher.gpus():
                return
        except ClusterUnreachable as error:
            said = str(error)
        time.sleep(0.5)
    raise LocalClusterError(f"waited {START_SECONDS} s for Ray: {said} (log: {log})")


def _end(process: psutil.Process) -> None:
    """Terminate a process with all below it, then kill what is left."""
    try:
        below = process.children(recursive=True)
        process.terminate()
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs([process, *below], timeout=STOP_SECONDS)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=STOP_SECONDS)


def _gpus_there() -> bool:
    """Whether runs will find a GPU here: asked as they ask, in a process of its own, since the service has no torch."""
    program = "import sys; from rhyme_openrlhf.platform import gpu_present; sys.exit(0 if gpu_present() else 1)"
    try:
        asked = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=GPU_QUESTION_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, each another one."""
    with contextlib.ExitStack() as stack:
        return list(_bound(stack, count))


def _bound(stack: contextlib.ExitStack, count: int) -> Iterator[int]:
    for _ in range(count):
        bound = stack.enter_context(socket.socket())
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]
