"""The templates for Slurm and KubeRay: well-formed, and they start our command with what a cluster gives them.

Stand-ins for the clusters' programs behave as theirs do. tests/e2e/test_clusters.py runs Slurm's whole.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SLURM, KUBERAY = EXAMPLES / "slurm.sbatch", EXAMPLES / "kuberay.yaml"
GIVEN = {"DATA": "prompts.jsonl", "REWARD": "reward.py", "CONTROL_URL": "http://control:8000"}
GIVEN |= {"RHYME_CONTROL_TOKEN": "secret-token"}

# Programs that a cluster has and this machine lacks. Each writes its name and arguments to $LOG.
PROGRAMS = {
    "scontrol": 'if [[ $1 = show ]]; then echo first; echo second; else echo "scontrol $*" >>"$LOG"; fi',
    # Runs what follows Slurm's own options, as one task would.
    "srun": """
echo "srun $*" >>"$LOG"
while [[ $1 = -* ]]; do [[ $1 = -w ]] && shift; shift; done
exec "$@"
""",
    "ray": 'echo "ray $*" >>"$LOG"; exec sleep 60',
    # Counts GPUs, or is the run.
    "python": """
if [[ $1 = -c && $2 = *socket* ]]; then
    exec "$PYTHON" -c "${PRETENDED_WAY:-} $2" "$3"
elif [[ $1 = -c ]]; then
    # Every node of the job has begun its Ray.
    until (($(grep -c "^ray start" "$LOG") == 2)); do sleep 0.05; done
    cat "$LOG.gpus"
    exit
fi
echo "run $RAY_ADDRESS $*" >>"$LOG"
[[ -e $LOG.long ]] || exit "${RUN_CODE:-0}"
trap 'echo saved >>"$LOG"; exit "${SAVED_CODE:-143}"' TERM
while :; do sleep 0.1; done
""",
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch job of two nodes with 8 GPUs each, all of them up."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (programs / name).chmod(0o755)
    log = tmp_path / "log"
    log.touch()
    Path(f"{log}.gpus").write_text("16\n")
    path = f"{programs}:/usr/bin:/bin"
    slurm = {"SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": str(EXAMPLES.parent)}
    slurm |= {"SLURM_JOB_ID": "4711", "SLURM_CLUSTER_NAME": "alps"}
    programs_of = {"PATH": path, "PYTHON": sys.executable, "PRETENDED_WAY": way({"AF_INET": "10.0.0.7"})}
    return {**GIVEN, **slurm, **programs_of, "LOG": str(log), "HOME": str(tmp_path)}


def way(addresses: dict[str, str]) -> str:
    """Python that makes the network of a node: its own address in each family that leads to the other node."""
    return f"""
import socket
class Way:
    def __init__(self, family, kind): self.own = {addresses!r}.get(socket.AddressFamily(family).name)
    def connect(self, to):
        assert to == ("second", 9)
        if not self.own: raise OSError("no address of this family")
    def getsockname(self): return (self.own, 4711)
socket.socket = Way
"""


def lines(cluster: dict[str, str], first: str) -> list[str]:
    """What a program was called with."""
    return [line for line in Path(cluster["LOG"]).read_text().splitlines() if line.startswith(first)]


def parsed(options: list[str]) -> Any:
    """A command line, by OpenRLHF's parser and ours. However often it is started, it goes on."""
    pytest.importorskip("openrlhf")
    from rhyme_openrlhf.cli import upstream

    args = upstream.parse(options)
    assert args.ckpt.load_enable
    return args


def needed_gpus(args: Any) -> int:
    """GPUs of a run."""
    from rhyme_openrlhf.run.resources import required_gpus

    return required_gpus(args)


def test_slurm_starts_a_ray_over_all_nodes_and_the_run_on_it(cluster: dict[str, str]) -> None:
    done = subprocess.run([SLURM, "--train.num_episodes", "3"], env=cluster, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    head, worker = sorted(lines(cluster, "ray start"), key=lambda line: "--head" not in line)
    assert "--head --node-ip-address=10.0.0.7 --port=6379" in head
    assert "--address=10.0.0.7:6379 --num-gpus=8" in worker
    assert any("--exclude=first" in line and "--nodes=1" in line for line in lines(cluster, "srun"))
    (run,) = lines(cluster, "run ")
    _, address, *command = shlex.split(run)
    assert address == "10.0.0.7:6379" and command[:2] == ["-m", "rhyme_openrlhf.cli.train_ppo_ray"]
    assert command[-2:] == ["--train.num_episodes", "3"] and "secret-token" not in run
    args = parsed(command[2:])
    assert needed_gpus(args) == 16 and args.control.url == GIVEN["CONTROL_URL"]
    # Another job of the same folder goes on from no checkpoint of this one.
    assert args.ckpt.path == "ckpt/4711/resume"


@pytest.mark.parametrize(
    ("addresses", "head"),
    [
        ({"AF_INET": "10.0.0.7", "AF_INET6": "fd00::7"}, "10.0.0.7:6379"),
        ({"AF_INET6": "fd00::7"}, "[fd00::7]:6379"),
    ],
)
def test_ray_has_the_address_by_which_other_nodes_reach_the_first(
    addresses: dict[str, str], head: str, cluster: dict[str, str]
) -> None:
    done = subprocess.run(
        [SLURM], env=cluster | {"PRETENDED_WAY": way(addresses)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert any(f"--address={head} " in line for line in lines(cluster, "ray start"))
    assert lines(cluster, f"run {head} ")


def test_a_node_without_a_way_to_the_others_is_said(cluster: dict[str, str]) -> None:
    done = subprocess.run([SLURM], env=cluster | {"PRETENDED_WAY": way({})}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "slurm.sbatch: there is no way to second" in done.stderr
    assert not lines(cluster, "ray")


def test_every_start_of_a_job_is_one_run_of_the_control_plane(cluster: dict[str, str]) -> None:
    uids = []
    for changes in ({}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "4712"}, {"SLURM_CLUSTER_NAME": "daint"}):
        Path(cluster["LOG"]).write_text("")
        subprocess.run([SLURM], env=cluster | changes, check=True, capture_output=True, timeout=60)
        (run,) = lines(cluster, "run ")
        uids.append(re.search(r"--control.run_uid ([0-9a-f]{16}) ", run)[1])  # type: ignore[index]
    assert uids[0] == uids[1] and len(set(uids)) == 3


def test_the_jobs_exit_code_is_the_runs(cluster: dict[str, str]) -> None:
    assert subprocess.run([SLURM], env=cluster | {"RUN_CODE": "7"}, capture_output=True, timeout=60).returncode == 7


@pytest.mark.parametrize(
    ("sent", "code", "requeued"),
    [
        # The time limit, or preemption with send_user_signal.
        (signal.SIGUSR1, 143, True),
        # The run was complete in time.
        (signal.SIGUSR1, 0, False),
        # scancel: nobody wants it back.
        (signal.SIGTERM, 143, False),
    ],
)
def test_a_run_that_the_time_limit_ended_is_requeued(
    sent: signal.Signals, code: int, requeued: bool, cluster: dict[str, str]
) -> None:
    Path(cluster["LOG"] + ".long").touch()
    environment = cluster | {"SAVED_CODE": str(code)}
    job = subprocess.Popen([SLURM], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not lines(cluster, "run "):
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.05)
    # The run's own trap is set right after the line.
    time.sleep(0.5)
    job.send_signal(sent)
    assert job.wait(60) == code, job.communicate()
    assert lines(cluster, "saved")
    assert lines(cluster, "scontrol") == (["scontrol requeue 4711"] if requeued else [])


def test_slurm_leaves_time_for_a_step_and_all_memory(cluster: dict[str, str]) -> None:
    asked = re.findall(r"^#SBATCH (--.*)$", SLURM.read_text(), re.MULTILINE)
    assert {"--requeue", "--mem=0", "--open-mode=append"} <= set(asked)
    (before,) = [int(one.rpartition("@")[2]) for one in asked if one.startswith("--signal=B:USR1@")]
    subprocess.run([SLURM], env=cluster, check=True, capture_output=True, timeout=60)
    (run,) = lines(cluster, "run ")
    # The run ends by itself before Slurm ends it, with time for its last events.
    assert before - 120 >= float(re.search(r"--limits.sigterm_s (\d+)", run)[1]) >= 900  # type: ignore[index]


def test_a_ray_without_all_gpus_is_said_and_nothing_is_trained(cluster: dict[str, str]) -> None:
    Path(cluster["LOG"] + ".gpus").write_text("8\n")
    done = subprocess.run([SLURM], env=cluster | {"TRIES": "1"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Ray has 8 of 16 GPUs" in done.stderr
    assert not lines(cluster, "run ")


@pytest.mark.parametrize("name", GIVEN)
def test_what_slurm_is_not_given_is_named(name: str, cluster: dict[str, str]) -> None:
    environment = {key: value for key, value in cluster.items() if key != name}
    done = subprocess.run([SLURM], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and f"set {name} to" in done.stderr


def test_the_shell_is_clean() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", SLURM], check=True)


@pytest.fixture
def job() -> Any:
    """The RayJob."""
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(KUBERAY.read_text())


def groups(job: Any) -> list[Any]:
    """Head and workers."""
    spec = job["spec"]["rayClusterSpec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


# `ray` in the pod that submits: the job is not known, and what is submitted goes to the head.
SUBMITTING_RAY = """#!/usr/bin/env bash
[[ $1 $2 = "job status" ]] && exit 1
[[ $1 $2 = "job submit" ]] || exit 0
while [[ $1 != -- ]]; do shift; done
shift
"$PYTHON" -c 'import subprocess, sys; print(subprocess.list2cmdline(sys.argv[1:]))' "$@" >"$SUBMITTED"
"""


def submitted(job: Any, folder: Path) -> str:
    """The command that KubeRay's pod submits, which has none of the head's environment."""
    entrypoint = job["spec"]["entrypoint"].strip()
    (folder / "submitting").mkdir()
    program = folder / "submitting" / "ray"
    program.write_text(SUBMITTING_RAY.replace("$1 $2", '"$1 $2"'))
    program.chmod(0o755)
    # As KubeRay 1.7 builds it (ray-operator/controllers/ray/common/job.go).
    address = "--address http://head:8265"
    command = (
        f"if ! ray job status {address} rhyme-ab >/dev/null 2>&1 ; then ray job submit {address} --no-wait "
        f"--submission-id rhyme-ab -- {entrypoint} ; fi ; ray job logs {address} --follow rhyme-ab"
    )
    environment = {
        "PATH": f"{program.parent}:/usr/bin:/bin", "PYTHON": sys.executable, "SUBMITTED": str(folder / "submitted"),
        "RAY_DASHBOARD_ADDRESS": "head:8265", "RAY_JOB_SUBMISSION_ID": "rhyme-ab",
    }  # fmt: skip
    subprocess.run(["bash", "-ce", command], env=environment, check=True, timeout=60)
    return (folder / "submitted").read_text()


def test_kuberay_gives_the_gpus_that_its_command_asks_for(job: Any, cluster: dict[str, str], tmp_path: Path) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    environment = {one["name"]: one.get("value", "secret") for one in container(groups(job)[0])["env"]}
    assert {"DATA", "REWARD", "OUTPUT", "RHYME_CONTROL_TOKEN"} == set(environment)
    # In the image the sources are at /src. Ray's head runs it by a shell.
    entrypoint = submitted(job, tmp_path).replace("/src/", f"{EXAMPLES.parent}/")
    given = {name: cluster[name] for name in ("PATH", "LOG", "HOME", "PYTHON")} | environment
    subprocess.run(entrypoint, shell=True, env=given, check=True, timeout=60)
    (run,) = lines(cluster, "run ")
    command = shlex.split(run)[1:]
    args = parsed(command[command.index("-m") + 2 :])
    needed = needed_gpus(args)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    each = int(container(workers)["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["replicas"] * each == needed and workers["rayStartParams"]["num-gpus"] == str(each)
    # Everything that a next cluster goes on from is on the volume, in folders of this RayJob.
    assert args.control.url == "http://rhyme-control:8420" and job["spec"]["backoffLimit"] > 0
    name = job["metadata"]["name"]
    for path in (args.run.dir, args.ckpt.path, args.ckpt.output_dir):
        assert path.startswith(f"/data/{name}/"), path


def test_rays_object_store_fits_into_the_pods_shared_memory(job: Any) -> None:
    for group in groups(job):
        (shm,) = [one for one in group["template"]["spec"]["volumes"] if one["name"] == "shm"]
        size = int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30
        store = int(group["rayStartParams"]["object-store-memory"])
        # Ray refuses an object store of less, and two versions of the 8B model's weights want the rest of a worker's.
        assert 75 * 2**20 < store < size
        if group.get("groupName"):
            assert size - store > 2 * 2 * 8.2e9


def container(group: Any) -> Any:
    """The one container of a group's pods."""
    (found,) = group["template"]["spec"]["containers"]
    return found
