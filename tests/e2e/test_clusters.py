"""The template for Slurm, whole: real Ray over machines of a network, real runs, a control plane elsewhere.

Stand-ins are Slurm's own programs: `srun` and `scontrol`, its signals and its requeue.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.telemetry.events import CheckpointSaved, Event, Note, ProcessDied, RunFinished, TrainStep
from tests.e2e.runs import RUN_TIMEOUT_S, SMALL, events_of
from tests.machines import Machines

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANE = "rhyme-control"
ADDRESSES = {"first": "10.77.0.1/24", "second": "10.77.0.2/24", PLANE: "10.77.0.9/24"}
URL = f"http://{PLANE}:8420"
RHYME = [sys.executable, "-m", "rhyme_openrlhf.cli.main"]
# In order: a time limit, a lost node, the end. Each has a Ray and a run.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * RUN_TIMEOUT_S)]

# Machines of the real size: CPU slots for all actors, and GPUs that are pretended anyway.
RAY = """#!/usr/bin/env bash
[[ $1 = start ]] && exec {ray} "$@" --num-cpus=32 --object-store-memory=200000000 --disable-usage-stats
exec {ray} "$@"
"""
SRUN = """#!/usr/bin/env bash
nodes=(first second)
while [[ $1 = -* ]]; do
    case $1 in
        -w) nodes=("$2"); shift ;;
        --exclude=first) nodes=(second) ;;
    esac
    shift
done
for node in "${{nodes[@]}}"; do
    nsenter -t "$(<{folder}/$node.pid)" --net --mount --uts "$@" &
done
trap 'kill $(jobs -p)' TERM
wait
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 = show ]]; then printf '%s\\n' first second; else echo "$*" >>{folder}/scontrol; fi
"""
RECIPE = """#!/usr/bin/env bash
exec python -m rhyme_openrlhf.cli.train_ppo_ray {options} \\
    --ckpt.path "$OUTPUT/resume" --ckpt.output_dir "$OUTPUT/model" "$@" {fitted}
"""
# Two engines and two ranks of the policy, on two nodes with two GPUs each.
FITTED = ["--vllm.num_engines", "2", "--actor.num_nodes", "2", "--actor.num_gpus_per_node", "1"]
FITTED += ["--ckpt.save_steps", "1", "--ckpt.max_num", "2", "--train.num_episodes", "3"]


class Cluster:
    """Two machines with GPUs and one with a control plane, whose runs write below `folder`, which all share."""

    def __init__(self, folder: Path, prompts: Path) -> None:
        self.folder = folder
        self.machines = Machines(folder, ADDRESSES)
        for name, machine in self.machines.by_name.items():
            (folder / f"{name}.pid").write_text(str(machine.pid))
        options = [*arguments(str(folder / "unused")), "--data.prompt_dataset", str(prompts), *SMALL]
        for name, script in (
            ("ray", RAY.format(ray=Path(sys.executable).with_name("ray"))),
            ("srun", SRUN.format(folder=folder)),
            ("scontrol", SCONTROL.format(folder=folder)),
            ("recipe", RECIPE.format(options=shlex.join(options), fitted=shlex.join(FITTED))),
        ):
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).write_text(script)
            (folder / "bin" / name).chmod(0o755)
        self.environment = {
            "PATH": f"{folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": os.environ["PYTHONPATH"], "HOME": str(folder), "PYTHONUNBUFFERED": "1",
            # A machine's name means its loopback: gloo would listen there.
            "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        self.token = ""

    def serve(self, *options: str) -> None:
        """Start the control plane on its machine, and sign in."""
        plane = self.machines[PLANE]
        command = [*RHYME, "serve", *options, "--serve.host=10.77.0.9", "--serve.insecure_public"]
        command += [f"--serve.allowed_hosts={PLANE}", f"--serve.data_dir={self.folder}/plane"]
        self.service = plane.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, cwd=self.folder)
        assert self.service.stdout is not None
        said = ""
        while not (found := re.search(r"http://10.77.0.9(\S+#code=\S+)", said)):
            line = self.service.stdout.readline()
            assert line, said
            said += line
        self.runs("login", given=f"http://{PLANE}{found[1]}\n")
        kept = json.loads(next(self.folder.glob(".config/**/*.json")).read_text())
        self.token = str(kept["servers"][URL])

    def runs(self, *words: str, given: str | None = None) -> str:
        """What `rhyme runs` says on a machine of the cluster."""
        asked = self.machines["first"].entered([*RHYME, "runs", *words])
        done = subprocess.run(asked, env=self.environment, input=given, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def events(self, number: int) -> list[Event]:
        """The events so far of the run's start of this number, from 0."""
        found = sorted(self.folder.glob("**/events.jsonl"), key=lambda path: path.stat().st_ctime)
        return events_of(found[number].parent) if len(found) > number else []

    def wait_for(self, number: int, condition: Callable[[Event], bool], process: subprocess.Popen[Any]) -> None:
        """Wait until the start has such an event, while the process runs."""
        end = time.monotonic() + RUN_TIMEOUT_S
        while not any(map(condition, self.events(number))):
            assert process.poll() is None and time.monotonic() < end, self.output()
            time.sleep(0.5)

    def output(self) -> str:
        """What the programs have printed."""
        return "\n".join(path.read_text()[-6000:] for path in sorted(self.folder.glob("*.out")))

    def clear(self) -> None:
        """End everything on the machines with GPUs, as the cluster does between two starts."""
        for name in ("first", "second"):
            self.machines[name].lose()

    def check_went_on(self, number: int, after: int) -> None:
        """The start of this number went on from a checkpoint of step `after` or later."""
        texts = [event.text for event in self.events(number) if isinstance(event, Note)]
        (resumed,) = [found for text in texts if (found := re.search(r"resumes from .* after step (\d+)", text))]
        assert int(resumed[1]) >= after
        steps = [event.step for event in self.events(number) if isinstance(event, TrainStep)]
        assert steps and min(steps) == int(resumed[1]) + 1


@pytest.fixture
def cluster(tmp_path: Path, small_prompts: Path, starts_e2e: None, starts_service: None) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, small_prompts)
    yield cluster
    cluster.machines.end()


def saved(event: Event) -> bool:
    return isinstance(event, CheckpointSaved)


def status(events: list[Event]) -> str:
    return next((event.status for event in events if isinstance(event, RunFinished)), "")


def test_slurms_job_goes_on_after_its_time_limit_and_after_a_lost_node(cluster: Cluster) -> None:
    cluster.serve("--no-local")
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_GPUS_ON_NODE": "2",
        "SLURM_SUBMIT_DIR": str(cluster.folder), "RECIPE": str(cluster.folder / "bin" / "recipe"),
        "DATA": "unused", "REWARD": "unused", "CONTROL_URL": URL, "RHYME_CONTROL_TOKEN": cluster.token,
    }  # fmt: skip

    def start(number: int) -> subprocess.Popen[Any]:
        """The batch script, as slurmd starts it on the job's first node."""
        environment = cluster.environment | job | {"SLURM_RESTART_COUNT": str(number)}
        with (cluster.folder / f"job{number}.out").open("w") as output:
            return cluster.machines["first"].run(
                ["bash", str(EXAMPLES / "slurm.sbatch")], env=environment, stdout=output, stderr=output
            )

    first = start(0)
    cluster.wait_for(0, saved, first)
    # Before the time limit. The script alone gets the signal.
    first.send_signal(signal.SIGUSR1)
    assert first.wait(RUN_TIMEOUT_S) == 143, cluster.output()
    assert (cluster.folder / "scontrol").read_text() == "requeue 4711\n"
    assert status(cluster.events(0)) == "stopped"
    done = max(event.step for event in cluster.events(0) if isinstance(event, CheckpointSaved))
    cluster.clear()

    second = start(1)
    cluster.wait_for(1, saved, second)
    cluster.machines["second"].lose()
    assert second.wait(RUN_TIMEOUT_S) == 1, cluster.output()
    cluster.check_went_on(1, done)
    # Its logs were on its own disk, and are in the run directory all the same.
    died = [event for event in cluster.events(1) if isinstance(event, ProcessDied) and event.node == "10.77.0.2"]
    (end,) = [event for event in cluster.events(1) if isinstance(event, RunFinished)]
    assert died and end.status == "failed" and "on 10.77.0.2) died during" in end.message
    # Slurm ends the job, because a node of it failed, and requeues it (--requeue).
    cluster.clear()

    third = start(2)
    assert third.wait(RUN_TIMEOUT_S) == 0, cluster.output()
    cluster.check_went_on(2, done + 1)
    assert status(cluster.events(2)) == "succeeded"
    (run,) = json.loads(cluster.runs("list", "--json"))["items"]
    assert len(json.loads(cluster.runs("show", run["uid"], "--json"))["attempts"]) == 3
