"""Ray on this machine for `rhyme serve`: a head on 127.0.0.1 that requires a token, with its Jobs API.

Invariants:

- Nothing listens for other machines.
- The head is a separate process, so a killed service leaves it and its runs alive. The next service with the same data
  directory takes it over.
- `stop` ends all of its processes.

Without a GPU, "GPU" is only a scheduling resource, as in platform/local_ray.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable, RayLauncher
from rhyme_openrlhf.run.resources import SPARE_CPUS

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
# Between the ports of Ray's workers and those that Linux gives to any program that asks for one. Ray ends if one of its
# ports is taken, for some of them only seconds after it has started.
PORTS = range(20_000, 32_768)
# Simulated GPUs are slots with one CPU slot each, enough to try a layout on a small machine. The number of runs limits
# how many processes really run side by side.
PRETENDED_GPUS = 8
# Enough for the sequences of small runs, as in platform/local_ray.py.
OBJECT_STORE_BYTES = 1024**3
# A busy machine needs a minute or two, most of it for the dashboard's nine processes.
START_SECONDS = 240
# Ray looks at its processes each second once its node is up, and ends if one of them has.
SETTLE_SECONDS = 2
STOP_SECONDS = 20
# Includes the import of torch, which detects GPUs.
GPU_QUESTION_SECONDS = 120
STATE_FILE = "ray.json"
TOKEN_FILE = "ray-token"
LOG_FILE = "ray.log"


class LocalClusterError(RuntimeError):
    """Ray does not start here; the message is one sentence for the user."""


class _EndedError(LocalClusterError):
    """Ray ended at its start."""


@dataclass(frozen=True)
class _State:
    """A started head. `created`: start time of its process, which tells it from another process with the same
    number.
    """

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
        """Return the launcher for this cluster."""
        return RayLauncher(self.address, self.token)

    def stop(self) -> None:
        """End the head and all its child processes within STOP_SECONDS."""
        _end(self._process)
        (self._data / STATE_FILE).unlink(missing_ok=True)


def start_local_cluster(data: Path) -> LocalCluster:
    """Start Ray, or take over a head that an earlier service with this data directory left running.

    Raises LocalClusterError.
    """
    if os.environ.get("RAY_ADDRESS"):
        raise LocalClusterError(
            "RAY_ADDRESS is set: pass that cluster's dashboard as --ray-address, or unset the variable"
        )
    data.mkdir(parents=True, exist_ok=True)
    token = _token(data)
    left = _left_running(data, token)
    if left is not None:
        return left
    gpus = _gpus_there()
    try:
        return _start(data, token, gpus)
    except _EndedError as error:
        # Another process may have taken one of the ports since they were chosen.
        logger.warning("%s; starting it once more", error)
        return _start(data, token, gpus)


def _start(data: Path, token: str, gpus: bool) -> LocalCluster:
    address = f"http://{HOST}:{(ports := _free_ports(6))[0]}"
    command = _command(data, ports, gpus)
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
        if not up:  # it failed, or a user pressed Ctrl-C
            cluster.stop()
    return cluster


def _command(data: Path, ports: list[int], gpus: bool) -> list[str]:
    dashboard, control, agent, agent_grpc, client, environments = map(str, ports)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={HOST}", f"--port={control}", f"--ray-client-server-port={client}"]
    command += ["--include-dashboard=true", f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    # Without this port, the server for Ray Client waits at most 30 s for the node to say its own, and then ends
    # (ray/util/client/server/proxier.py, Ray 2.55.0). It cannot be left out.
    command += [f"--runtime-env-agent-port={environments}", f"--temp-dir={_temp_dir(data)}"]
    if not gpus:
        cpus = PRETENDED_GPUS + SPARE_CPUS + PRETENDED_GPUS
        command += [f"--num-gpus={PRETENDED_GPUS}", f"--num-cpus={cpus}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    return command


def _environment(data: Path) -> Mapping[str, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return {
        **os.environ,
        # Jobs are started with "python": this interpreter.
        "PATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(data / TOKEN_FILE),
        # Ray's only switch (meant for other systems' firewalls) that makes 127.0.0.1 the node's address. Otherwise Ray
        # replaces --node-ip-address=127.0.0.1 by the public address, and its control store listens for all machines.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray gives up after 30 and 60 s: one of the dashboard's processes, and all of it.
        "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(START_SECONDS),
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START_SECONDS),
        # Ray would start a worker for each CPU slot in advance, and each worker imports torch.
        "RAY_prestart_worker_first_driver": "0",
    }


def _temp_dir(data: Path) -> Path:
    """Return the folder of Ray's sessions: short, because socket paths have at most 107 characters, and private.

    Each data directory has its own: jobs find their cluster by a file in this folder, which another head overwrites.
    """
    path = Path(tempfile.gettempdir()) / f"rhyme-ray-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o077:
        raise LocalClusterError(f"{path} is accessible to other users: remove it")
    # Ray makes its own folder readable for all users.
    return path / hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:8]


def _token(data: Path) -> str:
    """Return the cluster's token, created at the first start and readable for this user only."""
    path = data / TOKEN_FILE
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    # A copied file may be readable for others.
    path.chmod(0o600)
    return path.read_text().strip()


def _left_running(data: Path, token: str) -> LocalCluster | None:
    """Return the head that an earlier service left if it responds; end it if it does not."""
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
    up_since: float | None = None
    while (now := time.monotonic()) < deadline:
        if started.poll() is not None:
            raise _EndedError(f"Ray ended with code {started.returncode} at its start: see {log}")
        try:
            # The dashboard responds before its node has started.
            up = launcher.gpus() > 0
        except ClusterUnreachable as error:
            up, said = False, str(error)
        if not up:
            up_since = None
        elif up_since is None:
            up_since = now
        elif now >= up_since + SETTLE_SECONDS:
            return
        time.sleep(0.5)
    raise LocalClusterError(f"waited {START_SECONDS} s for Ray: {said} (log: {log})")


def _end(process: psutil.Process) -> None:
    """Terminate a process and its children, then kill those that remain."""
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
    """Return True if runs will find a GPU here.

    A separate process checks as runs do, because the service has no torch.
    """
    program = "import sys; from rhyme_openrlhf.platform import gpu_present; sys.exit(0 if gpu_present() else 1)"
    try:
        asked = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=GPU_QUESTION_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, all different."""
    return list(itertools.islice(filter(_is_free, random.SystemRandom().sample(PORTS, len(PORTS))), count))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind((HOST, port))
        except OSError:
            return False
    return True
