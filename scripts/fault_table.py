"""Make real runs fail in every known way, and write down what happened: the table in docs/reliability.md.

    python scripts/fault_table.py [--only NAME ...] [--write]

Each fault gets a small real run of its own (embedded model, one engine). The fault is injected when the run reaches a
given event. Then the script waits for the run to end and checks its output, its duration, what it left behind and what
survived. It exits with 1 if a fault did not end as promised: within LIMIT_SECONDS, with one sentence and a non-zero
code (or healed), no process left, a readable run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import table_in_page

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import CheckpointSaved, Event, RolloutStarted, RunFinished, StageStarted

LIMIT_SECONDS = 60.0
# Loading everything on two busy cores, and the few steps of a run that heals.
RUN_SECONDS = 900.0
PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
MARK = "fault table"

SMALL = """
    --vllm.num_engines 1 --rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 8
    --train.batch_size 16 --train.micro_batch_size 8 --train.num_episodes 2 --data.max_samples 8
    --run.progress lines
"""

# A reward function that is right until the second step has begun, then does what the fault says.
REWARD = """
import math, os, pathlib, time
from rhyme_openrlhf.embedded import reward
HERE = pathlib.Path(__file__).parent
def reward_func(queries, prompts, labels, **kwargs):
    if not (HERE / "go").exists():
        return reward.reward_func(queries, prompts, labels, **kwargs)
    {fault}
"""

# Makes the policy's rendezvous port one that is taken.
TAKE_PORT = """
import importlib.abc, importlib.util, os, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "openrlhf.trainer.ray.launcher":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            module.BaseDistributedActor._get_free_port = staticmethod(lambda: int(os.environ["TAKEN_PORT"]))
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


@dataclass
class Run:
    """A run under way, in its own folder."""

    folder: Path
    process: subprocess.Popen[str]
    output: Path
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def events(self) -> list[Event]:
        """Return the events that the run recorded so far."""
        log = self.folder / "run" / "events.jsonl"
        return [recorded.event for recorded in read_events(log)] if log.exists() else []

    def look(self) -> None:
        """Note the processes below the run, to know later which are left."""
        try:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def find(self, title: str) -> psutil.Process:
        """Return the newest process of the run whose command line holds `title`."""
        self.look()
        found = [p for p in self.seen if alive(p) and title in " ".join(p.cmdline())]
        return max(found, key=lambda process: process.create_time())

    def left(self) -> list[str]:
        """Return the run's processes that are still there."""
        return [" ".join(process.cmdline())[:60] for process in self.seen if alive(process)]


@dataclass(frozen=True)
class Fault:
    """A fault: when to inject it, and how. `inject` returns the unix time at which it took effect."""

    name: str
    text: str
    when: Callable[[Event], bool]
    inject: Callable[[Run], float]
    reward: str = ""
    heals: bool = False
    wrap: Callable[[list[str]], list[str]] = lambda command: command
    environment: Callable[[Path], dict[str, str]] = lambda folder: {}


def alive(process: psutil.Process) -> bool:
    """Return whether the process exists and is no zombie that its parent has to collect."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def second_rollout(event: Event) -> bool:
    """Return whether the second step's rollout has begun."""
    return isinstance(event, RolloutStarted) and event.step == 2


def second_training(event: Event) -> bool:
    """Return whether the second step's optimizer has begun."""
    return isinstance(event, StageStarted) and event.step == 2 and event.stage == "train"


def go(run: Run) -> float:
    """Have the reward function misbehave from now on."""
    (run.folder / "go").touch()
    return time.time()


def kill(title: str, number: int = signal.SIGKILL) -> Callable[[Run], float]:
    """Send a signal to the run's process of that title."""

    def inject(run: Run) -> float:
        run.find(title).send_signal(number)
        return time.time()

    return inject


def to_driver(number: int) -> Callable[[Run], float]:
    """Send a signal to the command itself."""

    def inject(run: Run) -> float:
        run.look()
        # The run's own reaper looks every two seconds.
        time.sleep(2)
        run.process.send_signal(number)
        return time.time()

    return inject


def from_start(run: Run) -> float:
    """Hold at once: the fault was there before the run."""
    return time.time()


def small_shared_memory(command: list[str]) -> list[str]:
    """Run with a /dev/shm of 2 MB, in a mount namespace of its own (needs root)."""
    mount = "mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "
    return ["unshare", "-m", "sh", "-c", mount + shlex.join(command)]


def taken_port(folder: Path) -> dict[str, str]:
    """Listen on a port, and have the run's rendezvous use it."""
    (folder / "sitecustomize.py").write_text(TAKE_PORT)
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen()
    TAKEN.append(listener)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "TAKEN_PORT": str(listener.getsockname()[1])}


# Held open until the script ends.
TAKEN: list[socket.socket] = []


def anything(event: Event) -> bool:
    """Hold from the first event on."""
    return True


FAULTS = (
    Fault("reward-raises", "the reward function raises", second_rollout, go, "raise ValueError('no answer found')"),
    Fault("reward-hangs", "the reward function hangs", second_rollout, go, "time.sleep(3600)"),
    Fault("reward-nan", "the reward function returns NaN", second_rollout, go, "return {'rewards': math.nan}"),
    Fault("port", "the policy's port is taken", anything, from_start, environment=taken_port),
    Fault("shm", "/dev/shm is too small (2 MB)", anything, from_start, wrap=small_shared_memory),
    Fault("ctrl-c", "Ctrl-C", second_rollout, to_driver(signal.SIGINT)),
    Fault("sigterm", "SIGTERM (a scheduler's preemption)", second_rollout, to_driver(signal.SIGTERM)),
    Fault("engine", "an engine's actor is killed", second_rollout, kill("RhymeRolloutActor")),
    Fault("engine-core", "an engine's vLLM process is killed", second_rollout, kill("EngineCore")),
    Fault("history", "a history worker is killed", second_rollout, kill("PlainHistoryWorker"), heals=True),
    Fault("policy", "the policy actor is killed", second_training, kill("RhymePolicyModelActor")),
    Fault("trainer", "the trainer is killed", second_rollout, kill("RhymePPOTrainer")),
    Fault("driver", "the command itself is killed (-9)", second_rollout, to_driver(signal.SIGKILL)),
)


def run_fault(fault: Fault, folder: Path) -> dict[str, object]:
    """Make one run with one fault; return the observations."""
    run = start(fault, folder)
    injected = ended = 0.0
    deadline = time.time() + RUN_SECONDS
    while run.process.poll() is None and time.time() < deadline:
        run.look()
        if not injected and any(fault.when(event) for event in run.events):
            injected = fault.inject(run)
        time.sleep(0.2)
    ended = time.time()
    stuck = run.process.poll() is None
    if stuck:
        run.process.kill()
    run.process.wait()
    # After kill -9 it is the reaper that ends the rest, some seconds later.
    while run.left() and time.time() < ended + LIMIT_SECONDS:
        time.sleep(0.5)
    left = run.left()
    gone = time.time()
    for process in run.seen:
        if alive(process):
            process.kill()
    return judge(fault, run, injected, max(ended, gone if fault.name == "driver" else ended), left, stuck)


def start(fault: Fault, folder: Path) -> Run:
    """Start the run that the fault will meet."""
    folder.mkdir()
    reward = folder / "reward.py"
    reward.write_text(REWARD.format(fault=fault.reward) if fault.reward else "")
    # The limits stay at their defaults: what users get.
    argv = [*arguments(str(folder / "checkpoints")), *shlex.split(SMALL), "--ckpt.save_steps", "100"]
    argv += ["--run.dir", str(folder / "run")]
    if fault.reward:
        argv += ["--reward.remote_url", str(reward), "--limits.reward_s", "15"]
    command = fault.wrap([sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv])
    output = folder / "output.log"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, text=True, env=os.environ | fault.environment(folder)
        )
    return Run(folder, process, output)


def judge(fault: Fault, run: Run, injected: float, ended: float, left: list[str], stuck: bool) -> dict[str, object]:
    """Return the row of the table, and each broken promise."""
    events = run.events
    lines = [line for line in run.output.read_text().splitlines() if line.startswith("rhyme train: ")]
    said = lines[-1].removeprefix("rhyme train: ").partition(" (logs:")[0] if lines else ""
    finished = [event for event in events if isinstance(event, RunFinished)]
    checkpoint = any(isinstance(event, CheckpointSaved) for event in events)
    seconds = ended - injected if injected else float("nan")
    code = run.process.returncode
    killed = fault.name == "driver"
    problems = []
    if not injected:
        problems.append("the run did not get to the fault")
    if stuck:
        problems.append(f"still running after {RUN_SECONDS:.0f} s")
    if left:
        problems.append(f"left behind: {left}")
    if fault.heals and code != 0:
        problems.append(f"did not heal: exit code {code}")
    if not fault.heals and code == 0:
        problems.append("exit code 0")
    if not fault.heals and not seconds <= LIMIT_SECONDS and fault.name not in ("port", "shm"):
        problems.append(f"took {seconds:.0f} s")
    if not killed and not fault.heals and len(lines) != 1:
        problems.append(f"{len(lines)} lines said why: {run.output.read_text()[-2000:]}")
    if not killed and not finished:
        problems.append("no RunFinished event")
    survived = ["record"] + ["checkpoint of the last step"] * checkpoint + ["the run itself"] * fault.heals
    return {
        "fault": fault.text,
        "seen": "a warning; the run goes on and succeeds" if fault.heals and code == 0 else said or "(nothing)",
        "code": code,
        "seconds": seconds,
        "survived": ", ".join(survived),
        "problems": problems,
    }


def markdown(rows: list[dict[str, object]]) -> str:
    """Return the table of docs/reliability.md."""
    lines = ["| fault | what is seen | exit code | seconds until the end | survives |", "|---|---|---|---|---|"]
    for row in rows:
        seen = str(row["seen"]).replace("|", "\\|")
        seconds = "goes on" if row["code"] == 0 else f"{row['seconds']:.0f}"
        lines.append(f"| {row['fault']} | {seen} | {row['code']} | {seconds} | {row['survived']} |")
    return "\n".join(lines)


def main() -> int:
    """Run the faults; returns 1 if one did not end as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], default=None)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rhyme-faults-") as folder:
        for fault in FAULTS:
            if chosen.only is None or fault.name in chosen.only:
                row = run_fault(fault, Path(folder) / fault.name)
                print(json.dumps(row), flush=True)
                rows.append(row)
    chosen.out.write_text(json.dumps(rows, indent=2) + "\n")
    print(markdown(rows))
    if chosen.write:
        table_in_page.put(PAGE, MARK, markdown(rows))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
