"""The cost of reporting for a run. Measured: real runs on this machine, interleaved.

    python benchmarks/control_plane.py --seeds 1 2 --out control_plane.json [-- options of rhyme train for every arm]

The same short run of the embedded model on two engines, seed by seed, on five arms in turn:

- `none`: no control plane.
- `up`: reports to a `rhyme serve` on this machine.
- `down`: reports to a port where nobody listens.
- `hanging`: reports to a server that accepts and never answers.
- `again`: `none` once more, which shows how much two equal runs differ.

The order turns with every seed. The runs are reproducible, so the steps of one seed are the same work on every arm.
Each step of an arm is compared with the same step of `none`. A step's time is from the end of the step before to its
own end, by the run's events; start-up and the first step do not count. The reporter's processor seconds are of the
whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.client import exchange
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import TrainStep
from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE

ARMS = ("none", "up", "down", "hanging", "again")
RHYME = (sys.executable, "-m", "rhyme_openrlhf.cli.main")
# Three steps an epoch, five epochs.
WORKLOAD = ("--data.max_samples", "24", "--rollout.batch_size", "8", "--train.num_episodes", "5", "--run.reproducible")
WORKLOAD += ("--train.batch_size", "64")
RUN_TIMEOUT_SECONDS = 1200
REPORTER = "rhyme_openrlhf.telemetry.reporter"
# Between two looks at the reporter: it lives as long as the run.
LOOK_SECONDS = 2.0
# The reporter of a run that has ended gives up after 30 s.
REPORTED_SECONDS = 60.0


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield a new service's address and an operator's token."""
    command = [*RHYME, "serve", "--no-local", "--serve.port=0", f"--serve.data_dir={folder}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as service:
        assert service.stdout is not None
        said = ""
        try:
            while not (link := re.search(r"(http://\S+)/#code=(\S+)", said)):
                line = service.stdout.readline()
                if not line:
                    raise RuntimeError(f"the service did not start: {said}")
                said += line
            yield link[1], exchange(link[1], link[2], "benchmark").token
        finally:
            service.terminate()


@contextmanager
def hanging() -> Iterator[str]:
    """Yield the address of a server that takes connections and data, and answers nothing."""
    kept = []
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(128)

        def take() -> None:
            while True:
                try:
                    kept.append(bound.accept()[0])
                except OSError:  # closed: the benchmark is over
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    for connection in kept:
        connection.close()


def unused() -> str:
    """Return an address where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"


class ReporterCpu(threading.Thread):
    """Notes the processor seconds that a run's reporter has used, from its start to the run's end."""

    def __init__(self, driver: int) -> None:
        super().__init__(name="reporter-cpu", daemon=True)
        self._driver = driver
        self.seconds = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        reporter = None
        with suppress(psutil.NoSuchProcess):
            while not self.ended.wait(LOOK_SECONDS):
                reporter = reporter or self._find()
                if reporter is not None:
                    used = reporter.cpu_times()
                    self.seconds = used.user + used.system

    def _find(self) -> psutil.Process | None:
        for child in psutil.Process(self._driver).children():
            if REPORTER in child.cmdline():
                return child
        return None


def run_arm(url: str, token: str, run_uid: str, seed: int, options: list[str], folder: Path) -> dict[str, Any]:
    """Make one run; return the seconds of its steps from the second on, and its reporter's processor seconds."""
    argv = [*arguments(str(folder / "checkpoints")), *WORKLOAD, "--train.seed", str(seed), *options]
    argv += ["--run.dir", str(folder / "run"), "--run.progress", "lines"]
    environment = dict(os.environ)
    if url:
        argv += ["--control.url", url, "--control.run_uid", run_uid]
        environment[TOKEN_VARIABLE] = token
    with subprocess.Popen([*RHYME, "train", *argv], env=environment) as driver:
        reporter = ReporterCpu(driver.pid)
        reporter.start()
        code = driver.wait(RUN_TIMEOUT_SECONDS)
        reporter.ended.set()
    if code != 0:
        raise RuntimeError(f"the run ended with {code}: see above")
    recorded = read_events(folder / "run" / "events.jsonl")
    ends = [one.time for one in recorded if isinstance(one.event, TrainStep)]
    steps = [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]
    return {"steps": steps, "reporter_cpu_seconds": reporter.seconds}


def check_reported(url: str, token: str, run_uid: str, events: Path) -> None:
    """Check that everything the run wrote has arrived. Raises RuntimeError."""
    written = events.read_bytes().count(b"\n")
    end = time.monotonic() + REPORTED_SECONDS
    with httpx.Client(base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
        while True:
            shown = client.get(f"/runs/{run_uid}").raise_for_status().json()
            if shown["status"] == "succeeded":
                break
            if time.monotonic() > end:
                raise RuntimeError(f"the run was not reported: it is {shown['status']}")
            time.sleep(0.5)
        stored, cursor = 0, None
        while stored == 0 or cursor:
            asked = {"limit": 1000, **({"cursor": cursor} if cursor else {})}
            page = client.get(f"/runs/{run_uid}/events", params=asked).raise_for_status().json()
            stored, cursor = stored + len(page["items"]), page["next_cursor"]
    if stored != written:
        raise RuntimeError(f"the run wrote {written} events, the service has {stored}")


def table(runs: list[dict[str, Any]]) -> str:
    """Return by arm the seconds of a step, and the ratios to the same steps without a control plane."""
    lines = [
        "| control plane | runs | step, median | same step / without, median | middle half | by seed | reporter, cpu |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = {run["seed"]: run["steps"] for run in runs if run["arm"] == "none"}
    for arm in ARMS:
        of = [run for run in runs if run["arm"] == arm and run["seed"] in plain]
        if not of:
            continue
        steps = [seconds for run in of for seconds in run["steps"]]
        by_seed = [[ours / theirs for ours, theirs in zip(run["steps"], plain[run["seed"]], strict=True)] for run in of]
        ratios = sorted(ratio for one in by_seed for ratio in one)
        low, _, high = statistics.quantiles(ratios, n=4)
        cpu = statistics.mean(run["reporter_cpu_seconds"] for run in of)
        seeds = ", ".join(f"{statistics.median(one):.3f}" for one in by_seed)
        lines.append(
            f"| {arm} | {len(of)} | {statistics.median(steps):.2f} s | {statistics.median(ratios):.3f} | "
            f"{low:.3f} to {high:.3f} | {seeds} | {cpu:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--out", type=Path, default=Path("control_plane.json"))
    parser.add_argument("options", nargs="*", help="options of rhyme train, after --")
    chosen = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rhyme-control-")))
        # On every arm the service is there; on all but one nobody asks it anything.
        url, token = stack.enter_context(serving(folder / "data"))
        urls = {"none": "", "again": "", "up": url, "down": unused(), "hanging": stack.enter_context(hanging())}
        for turn, seed in enumerate(chosen.seeds):
            for arm in [*chosen.arms[turn % len(chosen.arms) :], *chosen.arms[: turn % len(chosen.arms)]]:
                place = folder / f"{arm}-{seed}"
                place.mkdir()
                run_uid = secrets.token_hex(8)
                measured = run_arm(urls[arm], token, run_uid, seed, chosen.options, place)
                if arm == "up":
                    check_reported(url, token, run_uid, place / "run" / "events.jsonl")
                runs.append({"arm": arm, "seed": seed, **measured})
                chosen.out.write_text(json.dumps({"kind": "measured", "cpus": os.cpu_count(), "runs": runs}) + "\n")
                print(table(runs), flush=True)


if __name__ == "__main__":
    main()
