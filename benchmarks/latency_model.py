"""Error of predicted step times, on a run that the profile never saw. Measured: profile and run on this machine.

    python benchmarks/latency_model.py --out latency_model.json [--runs DIRECTORY ...]

Makes a profile (`rhyme profile` of the embedded model), then a real run of several epochs that plans its drafts by it.
Then it compares, in every rollout stage and engine, the model's prediction with the measured time of decode steps, by
number of samples. Both are means over the stage's steps with that many samples running, from the run's DraftBudget
events, weighted by steps.

Beside them stand the error on the profile's own points, each held out once, and the spread of identical steps, which is
the least error that any model can have. `--runs` reads existing runs instead of making one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rhyme_openrlhf.latency.profile import read
from rhyme_openrlhf.latency.step_model import assess
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import DraftBudget

EPOCHS = 4
TIMEOUT_SECONDS = 1200
# A mean of fewer steps is mostly their noise.
FEWEST_STEPS = 5


@dataclass(frozen=True)
class Compared:
    """Decode steps of one stage and engine with one number of running samples."""

    step: int
    running: int
    steps: int
    predicted_ms: float
    real_ms: float

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the real time."""
        return self.predicted_ms / self.real_ms - 1


def compared(run: Path) -> list[Compared]:
    """Return all that can be compared in a run's record."""
    found = []
    for recorded in read_events(run / "events.jsonl"):
        event = recorded.event
        if isinstance(event, DraftBudget):
            rows = zip(event.running, event.decode_steps, event.predicted_ms, event.real_ms, strict=True)
            found += [Compared(event.step, *row) for row in rows if row[1] >= FEWEST_STEPS]
    return found


def mean_error(rows: Sequence[Compared]) -> float:
    """Mean |error|, weighted by steps."""
    return sum(abs(row.error) * row.steps for row in rows) / sum(row.steps for row in rows)


def table(rows: Sequence[Compared]) -> str:
    """Return the errors by training step, then by samples running."""
    lines = ["training step   decode steps   predicted ms   real ms   mean |error|   error of the mean"]
    lines += [
        _line(f"{step:13d}", [row for row in rows if row.step == step]) for step in sorted({r.step for r in rows})
    ]
    lines.append("samples running")
    for low in (1, 2, 4, 8, 16, 32, 64):
        some = [row for row in rows if low <= row.running < 2 * low]
        if some:
            lines.append(_line(f"{low:6d} to {2 * low - 1:3d}", some))
    return "\n".join(lines)


def _line(name: str, rows: Sequence[Compared]) -> str:
    steps = sum(row.steps for row in rows)
    predicted, real = (sum(getattr(r, n) * r.steps for r in rows) / steps for n in ("predicted_ms", "real_ms"))
    return (
        f"{name}  {steps:13d}  {predicted:13.2f}  {real:8.2f}  {mean_error(rows):13.1%}  {predicted / real - 1:+17.1%}"
    )


def rhyme(*arguments: str) -> None:
    """Run a command of ours."""
    subprocess.run([sys.executable, "-m", "rhyme_openrlhf.cli.main", *arguments], check=True, timeout=TIMEOUT_SECONDS)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("latency_model.json"))
    parser.add_argument("--profile", type=Path, help="one that is there already")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="run directories to read instead of a new run")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rhyme-latency-") as folder:
        profile, runs = chosen.profile or Path(folder) / "profile.json", chosen.runs
        if not profile.exists():
            rhyme("profile", "--out", str(profile))
        if not runs:
            runs = [Path(folder) / "run"]
            rhyme(
                "demo", "--run.dir", str(runs[0]), "--run.progress", "lines", "--latency.profile", str(profile),
                "--train.num_episodes", str(EPOCHS), "--ckpt.path", str(Path(folder) / "checkpoints"),
                "--ckpt.output_dir", str(Path(folder) / "trained"),
            )  # fmt: skip
        quality = assess(read(profile))
        rows = [row for run in runs for row in compared(run)]
    if not rows:
        raise SystemExit("the runs have no DraftBudget events: were they started with --latency.profile none?")
    # The correction is learnt in the first rollouts.
    later = [row for row in rows if row.step > 2]
    result = {
        "kind": "measured",
        "cpus": os.cpu_count(),
        "mean_error": mean_error(later),
        "median_error": statistics.median(abs(row.error) for row in later),
        "held_out_error": quality.held_out_error,
        "spread_of_identical_steps": quality.noise,
        "rows": [vars(row) for row in rows],
    }
    chosen.out.write_text(json.dumps(result) + "\n")
    print(table(rows))
    print(f"mean |error| from training step 3 on: {result['mean_error']:.1%}; median {result['median_error']:.1%}")
    held_out = "not known" if quality.held_out_error is None else f"{quality.held_out_error:.1%}"
    print(f"on {quality.points} points of the profile, held out: {held_out}")
    print(f"spread of identical steps: {quality.noise:.1%}")


if __name__ == "__main__":
    main()
