"""Does the embedded run learn, as well in one way as in another, and how fast are its rollouts? Measured: real runs.

    python benchmarks/learning.py --seeds 1 2 3 --out learning.json
    python benchmarks/learning.py --arm "async=--train.async_enable" \\
        --arm "pipeline=--train.async_enable --histopipe.enable" --out learning.json [-- options of all arms]

Prints a table (reward by epoch, rollout speed, speculation) and writes it as JSON. The runs follow one another, the
arms in turn; each is `rhyme demo --train.seed N` in a process of its own. What the file has already is not run again,
so that runs can be made in parts (`--runs`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The reward that a run ends with: of its last epochs, for one epoch's 384 answers alone have a standard error of 0.025.
LAST_EPOCHS = 2


def run(seed: int, options: list[str], folder: Path) -> dict[str, Any]:
    """Make one demo run; return its summary with `seed` and the wall-clock seconds of the whole command."""
    directory = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "demo", "--train.seed", str(seed)]
    started = time.time()
    subprocess.run([*command, "--run.dir", str(directory), *options], check=True)
    summary = json.loads((directory / "summary.json").read_text())
    return summary | {"seed": seed, "wall_seconds": time.time() - started}


def final_reward(row: dict[str, Any]) -> float:
    """Return the mean reward of a run's last epochs."""
    return statistics.fmean(epoch["reward"] for epoch in row["epochs"][-LAST_EPOCHS:])


def table(runs: list[dict[str, Any]]) -> str:
    """Return a row a run (reward by epoch, speed, speculation), and below each arm against the first by seed."""
    lines = ["arm          seed   wall s   reward by epoch" + " " * 33 + "tokens/s  tokens/step  drafted"]
    for row in sorted(runs, key=lambda row: (row["arm"], row["seed"])):
        rewards = " ".join(f"{epoch['reward']:.3f}" for epoch in row["epochs"])
        lines.append(
            f"{row['arm']:12s} {row['seed']:4d} {row['wall_seconds']:8.0f}   {rewards:46s}"
            f" {row['tokens_per_second']:9.0f} {row['tokens_per_step']:12.2f} {row['speculation_rate']:8.0%}"
        )
    by_arm: dict[str, dict[int, float]] = {}
    for row in runs:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = final_reward(row)
    first = next(iter(by_arm.values()))
    for arm, finals in by_arm.items():
        line = f"{arm}: last {LAST_EPOCHS} epochs {_with_spread(list(finals.values()))} over {len(finals)} seeds"
        both = [finals[seed] - first[seed] for seed in finals if seed in first]
        lines.append(line if finals is first or not both else f"{line}; against the first arm {_with_spread(both)}")
    return "\n".join(lines)


def _with_spread(values: list[float]) -> str:
    spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def named(arm: str) -> tuple[str, list[str]]:
    """NAME=OPTIONS. Raises argparse.ArgumentTypeError."""
    name, separator, options = arm.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"an arm is NAME=OPTIONS, got {arm!r}")
    return name, shlex.split(options)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arm", type=named, action="append", help="NAME=OPTIONS of rhyme train; several are compared")
    parser.add_argument("--runs", type=int, default=sys.maxsize, help="make at most this many runs now")
    parser.add_argument("--out", type=Path, default=Path("learning.json"))
    parser.add_argument("options", nargs="*", help="options of rhyme train for all arms, after --")
    arguments = parser.parse_args()
    arms = arguments.arm or [("default", [])]
    runs = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    missing = [
        (seed, name, options)
        for seed in arguments.seeds
        for name, options in arms
        if not any((row["arm"], row["seed"]) == (name, seed) for row in runs)
    ]
    machine = {"cpus": os.cpu_count(), "host": os.uname().machine}
    for seed, name, options in missing[: arguments.runs]:
        with tempfile.TemporaryDirectory(prefix="rhyme-learning-") as folder:
            runs.append(run(seed, [*options, *arguments.options], Path(folder)) | {"arm": name})
        arguments.out.write_text(json.dumps({"kind": "measured", "machine": machine, "runs": runs}, indent=2) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
