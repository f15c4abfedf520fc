"""The templates for Slurm and KubeRay: well-formed, and they start our command with what a cluster gives them."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
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
    "scontrol": "echo first; echo second",
    # Runs what follows Slurm's own options, as one task would.
    "srun": """
echo "srun $*" >>"$LOG"
while [[ $1 = -* ]]; do [[ $1 = -w ]] && shift; shift; done
exec "$@"
""",
    "hostname": "echo 10.0.0.7 fe80::7",
    "ray": 'echo "ray $*" >>"$LOG"; exec sleep 60',
    # Counts GPUs, or is the run.
    "python": """
if [[ $1 = -c ]]; then
    # Every node of the job has begun its Ray.
    until (($(grep -c "^ray start" "$LOG") == 2)); do sleep 0.05; done
    cat "$LOG.gpus"
    exit
fi
echo "run $RAY_ADDRESS $*" >>"$LOG"
[[ -e $LOG.long ]] || exit "${RUN_CODE:-0}"
trap 'echo saved >>"$LOG"; exit 0' TERM
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
    return {**GIVEN, **slurm, "PATH": path, "LOG": str(log), "HOME": str(tmp_path)}


def lines(cluster: dict[str, str], first: str) -> list[str]:
    """What a program was called with."""
    return [line for line in Path(cluster["LOG"]).read_text().splitlines() if line.startswith(first)]


def needed_gpus(options: list[str]) -> int:
    """GPUs of a command line, by OpenRLHF's parser and ours."""
    pytest.importorskip("openrlhf")
    from rhyme_openrlhf.cli import upstream
    from rhyme_openrlhf.run.resources import required_gpus
    from rhyme_openrlhf.settings.config import RhymeSettings

    args = upstream.parse(options)
    assert RhymeSettings.from_namespace(args).control.url == GIVEN["CONTROL_URL"]
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
    assert needed_gpus(command[2:]) == 16


def test_the_jobs_exit_code_is_the_runs(cluster: dict[str, str]) -> None:
    assert subprocess.run([SLURM], env=cluster | {"RUN_CODE": "7"}, capture_output=True, timeout=60).returncode == 7


def test_slurms_signal_reaches_the_run_which_may_finish(cluster: dict[str, str]) -> None:
    Path(cluster["LOG"] + ".long").touch()
    job = subprocess.Popen([SLURM], env=cluster, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not lines(cluster, "run "):
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.05)
    # The run's own trap is set right after the line.
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0, job.communicate()
    assert lines(cluster, "saved")


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


def test_kuberay_gives_the_gpus_that_its_command_asks_for(job: Any, cluster: dict[str, str]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    environment = {one["name"]: one.get("value", "") for one in container(groups(job)[0])["env"]}
    assert set(GIVEN) <= set(environment)
    # In the image the sources are at /src.
    entrypoint = job["spec"]["entrypoint"].replace("/src/", f"{EXAMPLES.parent}/")
    given = cluster | environment | {"CONTROL_URL": GIVEN["CONTROL_URL"]}
    subprocess.run(["bash", "-c", entrypoint], env=given, check=True, timeout=60)
    (run,) = lines(cluster, "run ")
    command = shlex.split(run)[1:]
    needed = needed_gpus(command[command.index("-m") + 2 :])
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    each = int(container(workers)["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["replicas"] * each == needed and workers["rayStartParams"]["num-gpus"] == str(each)


def container(group: Any) -> Any:
    """The one container of a group's pods."""
    (found,) = group["template"]["spec"]["containers"]
    return found
