"""The speed of rollouts and whole steps, against OpenRLHF itself: real runs on this machine, interleaved.

    python benchmarks/rollout.py --seeds 1 2 3 --out rollout.json [-- options of rhyme train for every arm]

The same multi-epoch GRPO run, seed by seed, on three arms in turn: `openrlhf` (OpenRLHF 0.11.2's own classes; without
a GPU with the platform's shims and the gloo weight sync), `off` (ours without speculation) and `on` (ours as it comes).
The order of the arms turns with every seed, so that none always runs first. Ratios are of runs with the same seed. A
fourth arm, `--arms on rehearsal`, compares runs with and without --rehearsal.enable.

On GPUs the runs use the demo's placement for the GPUs that there are. `--cuda-graphs` lets the engines of every arm
compile the model and capture CUDA graphs, as a user's own run does.

All arms run as users run them: nothing is reproducible, so ours has all of its sources of drafts and cuts them by step
times. `--reproducible` seeds every request of every arm instead (which costs all of them time), and ours then drafts
from history and own text alone, by fixed rules.

The workload: long problems of the embedded task (the upper part of its length distribution), because drafts need
answers in which their window can grow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.embedded.tasks import STEP_COUNTS, jsonl, make_problem
from rhyme_openrlhf.platform import run_gpus
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import EngineStep, RolloutFinished, TrainStep
from rhyme_openrlhf.telemetry.metrics import EngineCounters

ARMS = ("openrlhf", "off", "on")
# Only when it is named: `on` with idle engines that rehearse.
REHEARSAL = "rehearsal"
# What only our own classes have; OpenRLHF's ignore it.
ARM_OPTIONS = {"openrlhf": (), "off": ("--no-histospec.enable",), "on": (), REHEARSAL: ("--rehearsal.enable",)}
KINDS = ("chain", "path", "sort")
# The longest third of the embedded task's length distribution.
QUANTILES = (0.66, 0.98)
PROMPTS = 12
EPOCHS = 6
# A common group size of GRPO; two steps an epoch, 48 samples an engine.
PROMPT_GROUPS = ("--rollout.batch_size", "6", "--rollout.n_samples_per_prompt", "16")
PARTS = ("rollout", "experience", "train", "sync")
# Upstream's names of the same parts (ppo_trainer.py).
UPSTREAM_PARTS = ("timing/generation", "timing/make_experience", "timing/ppo_train", "timing/broadcast")
RUN_TIMEOUT_SECONDS = 1800


def write_prompts(path: Path) -> None:
    """Write the workload's prompts, the same every time."""
    rng = random.Random(20)
    low, high = QUANTILES
    problems = [
        make_problem(kind, STEP_COUNTS[kind].at(low + (high - low) * (i + 0.5) / PROMPTS), rng)
        for i in range(PROMPTS)
        for kind in [KINDS[i % len(KINDS)]]
    ]
    path.write_text(jsonl(problems))


def run_arm(
    arm: str, seed: int, prompts: Path, options: Sequence[str], folder: Path, cuda_graphs: bool = False
) -> list[dict[str, Any]]:
    """Make one run; return a record for each step: tokens, seconds of each part, speculation counters."""
    directory = folder / f"{arm}-{seed}"
    directory.mkdir()
    demo = arguments(str(directory / "checkpoints"), run_gpus(), cuda_graphs=cuda_graphs)
    argv = [*demo, "--data.prompt_dataset", str(prompts)]
    argv += [
        "--train.num_episodes",
        str(EPOCHS),
        "--train.seed",
        str(seed),
        *PROMPT_GROUPS,
        *options,
        *ARM_OPTIONS[arm],
    ]
    if arm == "openrlhf":
        status = directory / "status.jsonl"
        command = [sys.executable, str(Path(__file__).with_name("unchanged.py")), str(status), *argv]
        with (directory / "output.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=RUN_TIMEOUT_SECONDS)
        return from_status(status)
    record = directory / "run"
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv, "--run.dir", str(record)]
    subprocess.run([*command, "--run.progress", "lines"], check=True, timeout=RUN_TIMEOUT_SECONDS)
    return from_events(record / "events.jsonl")


def from_status(path: Path) -> list[dict[str, Any]]:
    """Return the steps of an OpenRLHF run, from upstream's own status of each."""
    steps = []
    for line in path.read_text().splitlines():
        status = json.loads(line)
        parts = {ours: status[theirs] for ours, theirs in zip(PARTS, UPSTREAM_PARTS, strict=True)}
        learned = {"reward": status["reward"], "truncated": status["rollout/truncated_rate"]}
        steps.append({"step": status["step"], "tokens": status["response_tokens"], "parts": parts, **learned})
    return steps


def from_events(path: Path) -> list[dict[str, Any]]:
    """Return the steps of one of our runs, from its event log."""
    tokens: dict[int, int] = {}
    counters: dict[int, EngineCounters] = defaultdict(EngineCounters)
    steps = []
    for event in (recorded.event for recorded in read_events(path)):
        if isinstance(event, EngineStep):
            counters[event.step] += event.counters
        elif isinstance(event, RolloutFinished):
            tokens[event.step] = event.response_tokens
        elif isinstance(event, TrainStep):
            parts = {name: event.seconds_by_part[name] for name in PARTS}
            learned = {"reward": event.metrics["reward"], "truncated": event.metrics["truncated"]}
            steps.append({"step": event.step, "tokens": tokens[event.step], "parts": parts, **learned})
    return [step | {"counters": counters[step["step"]].to_dict()} for step in steps]


def by_epoch(steps: list[dict[str, Any]], per_epoch: int) -> list[dict[str, float]]:
    """Return the figures of each epoch of one run."""
    rows = []
    for first in range(0, len(steps), per_epoch):
        group = steps[first : first + per_epoch]
        tokens = sum(step["tokens"] for step in group)
        rollout = sum(step["parts"]["rollout"] for step in group)
        seconds = sum(sum(step["parts"].values()) for step in group)
        row = {"tokens": tokens, "tokens_per_s": tokens / rollout, "step_s": seconds / len(group)}
        row |= {f"{name}_s": sum(step["parts"][name] for step in group) / len(group) for name in PARTS}
        row |= {name: sum(step[name] for step in group) / len(group) for name in ("reward", "truncated")}
        if "counters" in group[0]:
            total = sum((EngineCounters.from_dict(step["counters"]) for step in group), EngineCounters())
            row |= {
                "tokens_per_step": total.decode_tokens / max(1, total.sample_steps),
                "acceptance": total.accepted / max(1, total.drafted),
                "ms_per_step": 1000 * total.busy_seconds / max(1, total.decode_steps),
            }
        rows.append(row)
    return rows


def ratios(runs: list[dict[str, Any]], arm: str, peer: str, later: bool) -> dict[str, list[float]]:
    """Arm against peer, one value a seed: rollout tokens/s, steps/s, and tokens per second of whole steps.

    The last because runs drift apart: a policy that answers at greater length trains longer steps in every arm.
    `later`: from the second epoch on; else the first epoch alone.
    """
    out: dict[str, list[float]] = {"rollout": [], "step": [], "step tokens": []}
    for seed in sorted({run["seed"] for run in runs}):
        of = {run["arm"]: run["steps"] for run in runs if run["seed"] == seed}
        if arm in of and peer in of:
            ours, theirs = (_speeds(of[name], later) for name in (arm, peer))
            out["rollout"].append(ours[0] / theirs[0])
            out["step"].append(ours[1] / theirs[1])
            out["step tokens"].append(ours[2] / theirs[2])
    return out


def _speeds(steps: list[dict[str, Any]], later: bool) -> tuple[float, float, float]:
    per_epoch = steps_per_epoch(steps)
    chosen = steps[per_epoch:] if later else steps[:per_epoch]
    tokens = sum(step["tokens"] for step in chosen)
    rollout = sum(step["parts"]["rollout"] for step in chosen)
    seconds = sum(sum(step["parts"].values()) for step in chosen)
    return tokens / rollout, len(chosen) / seconds, tokens / seconds


def steps_per_epoch(steps: list[dict[str, Any]]) -> int:
    """Steps of an epoch: the workload's epochs are equal."""
    return len(steps) // EPOCHS


def table(runs: list[dict[str, Any]]) -> str:
    """Return a row an arm and epoch (medians over seeds), then the ratios with their spread."""
    columns = (
        "epoch  tokens/s  step s  rollout s  experience s  train s  sync s  tok/step  accept  ms/step  reward  cut off"
    )
    lines = [f"arm       {columns}"]
    for arm in (*ARMS, REHEARSAL):
        epochs = [by_epoch(run["steps"], steps_per_epoch(run["steps"])) for run in runs if run["arm"] == arm]
        for number, rows in enumerate(zip(*epochs, strict=True), start=1):
            cells = [median(row.get(name) for row in rows) for name in COLUMNS]
            shown = [
                f"{value:{width}}" if value is not None else "-" for value, width in zip(cells, WIDTHS, strict=True)
            ]
            lines.append(f"{arm:10s}{number:5d}  " + "  ".join(shown))
    for arm, peer, later in COMPARISONS:
        for what, values in ratios(runs, arm, peer, later).items():
            if values:
                spread = f"{min(values):.2f} to {max(values):.2f}"
                when = "epochs 2 on" if later else "epoch 1"
                lines.append(f"{arm} / {peer}, {what}, {when}: {statistics.median(values):.2f}x ({spread})")
    return "\n".join(lines)


COLUMNS = (
    "tokens_per_s", "step_s", "rollout_s", "experience_s", "train_s", "sync_s",
    "tokens_per_step", "acceptance", "ms_per_step", "reward", "truncated",
)  # fmt: skip
# Arm, its peer, and whether from the second epoch on or in the first.
COMPARISONS = (
    ("on", "openrlhf", True), ("off", "openrlhf", True), ("on", "off", True), ("on", "off", False),
    (REHEARSAL, "on", False), (REHEARSAL, "on", True),
)  # fmt: skip
WIDTHS = ("8,.0f", "6.2f", "9.2f", "12.2f", "7.2f", "6.2f", "8.2f", "6.0%", "7.1f", "6.2f", "7.0%")


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, REHEARSAL), default=ARMS)
    parser.add_argument("--out", type=Path, default=Path("rollout.json"))
    parser.add_argument("--reproducible", action="store_true", help="seed every request, in all arms")
    parser.add_argument("--cuda-graphs", action="store_true", help="engines compile and capture graphs (GPUs)")
    parser.add_argument("--keep", type=Path, help="keep the run directories below this new directory")
    parser.add_argument("options", nargs="*", help="options of rhyme train, after --")
    chosen = parser.parse_args()
    options = [*chosen.options, *(["--run.reproducible"] if chosen.reproducible else [])]
    conditions = {"kind": "measured", "cpus": os.cpu_count(), "gpus": run_gpus(), "options": options}
    conditions["cuda_graphs"] = chosen.cuda_graphs
    runs = []
    with contextlib.ExitStack() as stack:
        if chosen.keep:
            chosen.keep.mkdir(parents=True)
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rhyme-rollout-")))
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts)
        for turn, seed in enumerate(chosen.seeds):
            order = [*chosen.arms[turn % len(chosen.arms) :], *chosen.arms[: turn % len(chosen.arms)]]
            for arm in order:
                steps = run_arm(arm, seed, prompts, options, folder, chosen.cuda_graphs)
                runs.append({"arm": arm, "seed": seed, "steps": steps})
                chosen.out.write_text(json.dumps({**conditions, "runs": runs}) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
