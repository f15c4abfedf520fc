"""Does the embedded run learn, and how fast are its rollouts? Measured: real runs on this machine, one seed a run.

    python benchmarks/learning.py --seeds 1 2 3 --out learning.json [-- options of rhyme train]

Prints a table (reward by epoch, rollout speed, speculation) and writes it as JSON. The runs follow one another; each
is `rhyme demo --train.seed N` in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run(seed: int, options: list[str], folder: Path) -> dict[str, Any]:
    """One demo run; returns its summary with `seed` and the wall-clock seconds of the whole command."""
    directory = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "demo", "--train.seed", str(seed)]
    started = time.time()
    subprocess.run([*command, "--run.dir", str(directory), *options], check=True)
    summary = json.loads((directory / "summary.json").read_text())
    return summary | {"seed": seed, "wall_seconds": time.time() - started}


def table(runs: list[dict[str, Any]]) -> str:
    """A row a run: reward by epoch, then speed and speculation over all of it."""
    lines = ["seed   wall s   reward by epoch                                 tokens/s  tokens/step  speculation"]
    for row in runs:
        rewards = " ".join(f"{epoch['reward']:.3f}" for epoch in row["epochs"])
        lines.append(
            f"{row['seed']:4d} {row['wall_seconds']:8.0f}   {rewards:46s} {row['tokens_per_second']:9.0f}"
            f" {row['tokens_per_step']:12.2f} {row['speculation_rate']:12.0%}"
        )
    gains = [row["epochs"][-1]["reward"] - row["epochs"][0]["reward"] for row in runs]
    spread = f" +- {statistics.stdev(gains):.3f}" if len(gains) > 1 else ""
    lines.append(f"reward, last epoch less first: {statistics.fmean(gains):.3f}{spread} over {len(gains)} seeds")
    return "\n".join(lines)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("learning.json"))
    parser.add_argument("options", nargs="*", help="options of rhyme train, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rhyme-learning-") as folder:
        runs = [run(seed, arguments.options, Path(folder)) for seed in arguments.seeds]
    machine = {"cpus": os.cpu_count(), "host": os.uname().machine}
    arguments.out.write_text(json.dumps({"kind": "measured", "machine": machine, "runs": runs}, indent=2) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
