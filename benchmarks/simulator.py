"""How far is a simulated run from the real one? Measured: real runs on this machine, replayed with its own profile.

    python benchmarks/simulator.py --out simulator.json [--profile PROFILE] [--runs DIRECTORY ...]

Makes a profile (`rhyme profile` of the embedded model, one engine that runs alone), then real runs with two and three
engines, with and without drafts, and replays each as `rhyme simulate --from-run` does: the same lengths, engines and
trainer's speed, and what drafts gave in each step; of the run's times only the trainer's are used. Beside each other:
every rollout stage's seconds, and the share of the stages in which engines had nothing to run. `--runs`: runs that are
there already instead of new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from latency_model import rhyme

from rhyme_openrlhf.latency.profile import Profile, read
from rhyme_openrlhf.simulation.recorded_run import TOLERANCE, compare, read_run, summary
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features

EPOCHS = 3
ENGINES = (2, 3)


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
                "--ckpt.output_dir", str(folder / "trained"), *options,
            )  # fmt: skip
            found.append(run)
    return found


def replayed(directory: Path, profile: Profile) -> dict[str, Any]:
    """One run against its replay; printed, too."""
    run = read_run(directory, Cluster(), Features())
    result = Run(run.workload, run.cluster, run.features, {1: profile}, run.rates).go()
    compared = compare(run, result)
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
    parser.add_argument("--profile", type=Path, help="one that is there already")
    parser.add_argument(
        "--runs", type=Path, nargs="*", default=[], help="run directories to replay instead of new runs"
    )
    parser.add_argument("--out", type=Path, default=Path("simulator.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rhyme-simulator-") as folder:
        path = chosen.profile or Path(folder) / "profile.json"
        if not path.exists():
            rhyme("profile", "--out", str(path))
        profile = read(path)
        results = [replayed(run, profile) for run in chosen.runs or real_runs(Path(folder), path)]
    about = {"kind": "real runs measured, replays simulated", "cpus": os.cpu_count(), "runs": results}
    chosen.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
