"""Small training runs in processes of their own: started, watched, killed, and what is left of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhyme_openrlhf.shared_files import SHARED_MEMORY
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import Event, RolloutStarted, WeightsChecked, WeightsLoaded

# A run takes one to two minutes on two idle cores, and four beside much other work. What takes this long hangs.
RUN_TIMEOUT_S = 900

# 8 short prompts x 4 samples, two steps an epoch: enough to see history work, quick enough to do often.
SMALL = ["--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4", "--rollout.micro_batch_size", "8"]
SMALL += ["--train.batch_size", "16", "--train.micro_batch_size", "8", "--train.num_episodes", "2"]
SMALL += ["--data.max_len", "160", "--rollout.max_new_tokens", "100", "--run.reproducible"]

# fp32 on both sides: the same sums in another order.
SAME_LOG_PROBABILITY = 1e-3
EVERY_SYNC = ("--weights.check_syncs", "1000")
PIPELINE = ("--train.async_enable", "--histopipe.enable", "--no-run.reproducible", "--latency.profile", "none")
# Eight prompts in batches of three: each epoch's last step is a partial one.
PARTIAL = (
    "--rollout.batch_size", "3", "--train.batch_size", "4",
    "--rollout.micro_batch_size", "4", "--train.micro_batch_size", "2",
)  # fmt: skip
Train = Callable[..., "FinishedRun"]


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended: its directory, exit code, what it printed, and its events."""

    path: Path
    code: int
    output: str
    events: list[Event]

    def of(self, kind: type) -> list[Any]:
        """Its events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def events_of(directory: Path) -> list[Any]:
    """The events that a run has recorded so far."""
    log = directory / "events.jsonl"
    return [recorded.event for recorded in read_events(log)] if log.exists() else []


def left_in_shared_memory() -> set[str]:
    """Our files there that no process owns; those of tests that run beside this one are in use."""
    return {path.name for path in SHARED_MEMORY.glob("rhyme-*") if not _is_owned(path)}


def _is_owned(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_weights(run: FinishedRun, engines: int, steps: int) -> None:
    """Every engine loaded every version, and its log-probabilities then were the trained model's."""
    loaded = {(event.version, event.engine) for event in run.of(WeightsLoaded)}
    assert loaded == {(version, engine) for version in range(1, steps + 1) for engine in range(engines)}
    checked = run.of(WeightsChecked)
    assert len(checked) == engines * steps
    assert all(event.max_difference < SAME_LOG_PROBABILITY for event in checked)


def stacks_of(folder: Path) -> str:
    """Return the Python stacks of the processes that work in `folder`, by py-spy, which Ray's dashboard brings."""
    stacks = []
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if Path(os.readlink(process / "cwd")) == folder:
                dump = ["py-spy", "dump", "--nonblocking", "--pid", process.name]
                stacks.append(subprocess.run(dump, capture_output=True, text=True, timeout=30).stdout)
    return "\n".join(stacks)


# What a killed run's processes are known by when nothing is their parent any more.
MARK = "RHYME_TEST_RUN"


def processes_of(mark: str) -> list[int]:
    """All processes that inherited the environment of the run with this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def kill_all(mark: str) -> None:
    """SIGKILL for every process of the run, until there is none."""
    deadline = time.time() + 60
    while (left := processes_of(mark)) and time.time() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.2)
    assert not left, f"still there: {left}"


class KilledRun:
    """A run in processes of its own, that will not end well."""

    def __init__(self, directory: Path, argv: list[str], cwd: Path) -> None:
        self.path = directory
        self._mark = f"{os.getpid()}-{directory}"
        command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv, "--run.dir", str(directory)]
        self._output = cwd / "killed.out"
        with self._output.open("w") as output:
            self._driver = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=cwd, env={**os.environ, MARK: self._mark},
                start_new_session=True,
            )  # fmt: skip

    def events(self) -> list[Any]:
        return events_of(self.path)

    def wait_for(self, condition: Callable[[Any], bool], what: str) -> None:
        deadline = time.time() + RUN_TIMEOUT_S
        while not any(condition(event) for event in self.events()):
            assert self._driver.poll() is None, f"the run ended before {what}: {self._output.read_text()}"
            assert time.time() < deadline, f"waited {RUN_TIMEOUT_S} s for {what}"
            time.sleep(0.1)

    def terminate(self, all_processes: bool = False) -> None:
        """SIGTERM for the driver, or for all of the run's processes, as schedulers send it."""
        if all_processes:
            os.killpg(self._driver.pid, signal.SIGTERM)
        else:
            self._driver.terminate()

    def wait(self) -> FinishedRun:
        """Wait for its end."""
        code = self._driver.wait(RUN_TIMEOUT_S)
        return FinishedRun(self.path, code, self._output.read_text(), self.events())

    def kill(self) -> None:
        self._driver.kill()
        self._driver.wait()
        kill_all(self._mark)


def actors(folder: Path, name: str) -> list[int]:
    """Processes of the actors of a class whose driver works in `folder`, in the order of their start."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                found += [int(process.name)] if Path(os.readlink(process / "cwd")) == folder else []
        except OSError:
            # It has ended since.
            continue
    return sorted(found)


def engines(folder: Path) -> list[int]:
    """Processes of the engine actors whose driver works in `folder`, in the order of their start."""
    return actors(folder, "RhymeRolloutActor")


def kill_one_in_step(step: int, run: Path, folder: Path) -> None:
    """Kill one engine's actor once the rollout of `step` goes on."""
    end = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < end:
        if any(isinstance(event, RolloutStarted) and event.step == step for event in events_of(run)):
            time.sleep(0.3)
            os.kill(engines(folder)[-1], signal.SIGKILL)
            return
        time.sleep(0.1)


def journal_prompts(run: Path) -> list[tuple[int, str]]:
    """(step, prompt) of everything the run's history workers heard."""
    from rhyme_openrlhf.history.journal import HEADER, read_entries
    from rhyme_openrlhf.history.record import read_head

    found = []
    for path in sorted((run / "history").glob("*.journal")):
        token = HEADER.unpack(path.read_bytes()[: HEADER.size])[2]
        heads = [read_head(encoded) for encoded, _ in read_entries(path, token)]
        found += [(head.rollout_id, head.prompt_key) for head in heads]
    return found
