"""How far is a simulated run from the real one? Measured: real runs on this machine, replayed with its own profile.

    python benchmarks/simulator.py --out simulator.json [--profile PROFILE ...] [--runs DIRECTORY ...]

Makes profiles (`rhyme profile --sparse` of the embedded model: an engine alone, and with one and two others beside
it), then real runs with two and three engines, with and without drafts, and replays each as `rhyme simulate --from-run`
does: the same lengths, engines and trainer's speed, and how each sample drafted; of the run's times only the trainer's
are used. Beside each other: every rollout stage's seconds, and the share of the stages in which engines had nothing to
run. `--profile`, `--runs`: those that are there already instead of new ones.

The profiles know nothing of the runs. `--correct RUN` learns one number more, from a run that is not among those
compared: the median of its stages' real by simulated time, by which all simulated times are then multiplied.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from latency_model import rhyme

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation import shipped
from rhyme_openrlhf.simulation.recorded_run import TOLERANCE, RecordedRun, compare, read_run, summary
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features

EPOCHS = 2
ENGINES = (2, 3)
# All of a step's prompts: how each of their responses drafted is kept.
KEPT = 64
Profiles = tuple[dict[int, Profile], dict[int, Profile]]


def profiles(folder: Path) -> list[Path]:
    """New profiles: of an engine alone, and beside as many others as the runs have."""
    found = []
    for beside in range(max(ENGINES)):
        found.append(folder / f"beside-{beside}.json")
        rhyme("profile", "--sparse", "--beside", str(beside), "--out", str(found[-1]))
    return found


def real_runs(folder: Path, profile: Path) -> list[Path]:
    """Run directories of new runs, one for each number of engines, with and without drafts."""
    found = []
    for engines in ENGINES:
        for name, options in (
            ("drafts", ["--latency.profile", str(profile)]),
            ("no-drafts", ["--no-histospec.enable"]),
        ):
            run = folder / f"{engines}-engines-{name}"
            rhyme(
                "demo", "--run.dir", str(run), "--run.progress", "lines", "--vllm.num_engines", str(engines),
                "--train.num_episodes", str(EPOCHS), "--ckpt.path", str(folder / "checkpoints"),
                "--ckpt.output_dir", str(folder / "trained"), "--telemetry.sample_groups", str(KEPT), *options,
            )  # fmt: skip
            found.append(run)
    return found


def simulated(directory: Path, known: Profiles) -> tuple[RecordedRun, Result]:
    """A run, and its replay."""
    run = read_run(directory, Cluster(), Features())
    alone, crowds = known
    return run, Run(run.workload, run.cluster, run.features, alone, run.rates, crowds).go()


def correction(directory: Path, known: Profiles) -> float:
    """What a run says that the profiles do not: how much longer its stages take."""
    run, result = simulated(directory, known)
    return statistics.median(one.real / one.simulated for one in compare(run, result))


def replayed(directory: Path, known: Profiles, factor: float) -> dict[str, Any]:
    """One run against its replay, whose times are multiplied by `factor`; printed, too."""
    run, result = simulated(directory, known)
    compared = [dataclasses.replace(one, simulated=factor * one.simulated) for one in compare(run, result)]
    print(f"{directory.name}: {run.cluster.engines} engines, drafts {run.features.speculation}")
    print("step   rollout s, real   simulated    error   bubbles, real")
    for one in compared:
        print(f"{one.step:4d}  {one.real:16.2f}  {one.simulated:10.2f}  {one.error:+7.1%}  {one.bubbles:14.1%}")
    print(summary(compared, result), flush=True)
    return {
        "run": directory.name,
        "engines": run.cluster.engines,
        "speculation": run.features.speculation,
        "within_tolerance": sum(abs(one.error) <= TOLERANCE for one in compared) / len(compared),
        "median_error": statistics.median(one.error for one in compared),
        "steps": [vars(one) for one in compared],
        "device_seconds": dict(result.accounts.seconds),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, action="append", help="one that is there already; again for another")
    parser.add_argument("--correct", type=Path, metavar="RUN", help="a run directory, of a run that is not compared")
    parser.add_argument(
        "--runs", type=Path, nargs="*", default=[], help="run directories to replay instead of new runs"
    )
    parser.add_argument("--out", type=Path, default=Path("simulator.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rhyme-simulator-") as folder:
        paths = chosen.profile or profiles(Path(folder))
        known = shipped.load_all([str(path) for path in paths])
        factor = correction(chosen.correct, known) if chosen.correct else 1.0
        if chosen.correct:
            print(f"{chosen.correct.name}: real by simulated, median {factor:.2f}: all simulated times by this")
        results = [replayed(run, known, factor) for run in chosen.runs or real_runs(Path(folder), paths[0])]
    about = {"kind": "real runs measured, replays simulated", "cpus": os.cpu_count(), "factor": factor, "runs": results}
    chosen.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
