"""Speed of rollouts and whole steps, against OpenRLHF itself. Measured: real runs on this machine, interleaved.

    python benchmarks/rollout.py --seeds 1 2 3 --out rollout.json [-- options of rhyme train for every arm]

The same multi-epoch GRPO run, seed by seed, on three arms in turn:

- `openrlhf`: OpenRLHF 0.11.2's own classes; without a GPU with the platform's shims and the gloo weight sync.
- `off`: ours without speculation.
- `on`: ours by default.

The order of the arms turns with every seed, so that none always runs first. Ratios are of runs with the same seed.
A fourth arm, `--arms on rehearsal`, compares runs with and without --rehearsal.enable.

On GPUs the demo's placement for the available number is used. `--cuda-graphs` lets the engines of every arm compile the
model and capture CUDA graphs, as a user's own run does.

All arms run as users run them: nothing is reproducible, so ours has all of its sources of drafts and cuts them by step
times. `--reproducible` seeds every request of every arm instead (which costs all of them time), and ours then drafts
from history and own text alone, by fixed rules.

The workload: long problems of the embedded task (the upper part of its length distribution), because drafts need
answers in which their window can grow. `first_epoch.py` shares the functions here.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.platform import run_gpus
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import EngineStep, RolloutFinished, TrainStep
from rhyme_openrlhf.telemetry.metrics import EngineCounters

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from embedded_tasks import STEP_COUNTS, jsonl, make_problem

OPENRLHF = "openrlhf"
ARMS = (OPENRLHF, "off", "on")
# Only when it is named: `on` with idle engines that rehearse.
REHEARSAL = "rehearsal"
# Options of the arms with our own classes.
ARM_OPTIONS: dict[str, Sequence[str]] = {
    OPENRLHF: (), "off": ("--no-histospec.enable",), "on": (), REHEARSAL: ("--rehearsal.enable",)
}  # fmt: skip
KINDS = ("chain", "path", "sort")
# The longest third of the embedded task's length distribution.
QUANTILES = (0.66, 0.98)
PROMPTS = 12
EPOCHS = 6
# A common group size of GRPO; 48 samples an engine.
PROMPTS_A_STEP = 6
PROMPT_GROUPS = ("--rollout.batch_size", str(PROMPTS_A_STEP), "--rollout.n_samples_per_prompt", "16")
PARTS = ("rollout", "experience", "train", "sync")
# Upstream's names of the same parts (ppo_trainer.py).
UPSTREAM_PARTS = ("timing/generation", "timing/make_experience", "timing/ppo_train", "timing/broadcast")
RUN_TIMEOUT_SECONDS = 1800
# A record for each step of a run.
Steps = list[dict[str, Any]]


def write_prompts(path: Path, count: int = PROMPTS) -> None:
    """Write `count` prompts, the same every time."""
    rng = random.Random(20)
    low, high = QUANTILES
    problems = [
        make_problem(kind, STEP_COUNTS[kind].at(low + (high - low) * (i + 0.5) / count), rng)
        for i in range(count)
        for kind in [KINDS[i % len(KINDS)]]
    ]
    path.write_text(jsonl(problems))


def run_arm(
    name: str,
    seed: int,
    prompts: Path,
    options: Sequence[str],
    folder: Path,
    cuda_graphs: bool = False,
    epochs: int = EPOCHS,
) -> list[dict[str, Any]]:
    """Make one run, of OpenRLHF's own classes if the arm is named `openrlhf`; return a record for each step.

    A record has tokens, the seconds of each part, and speculation counters if there are any.
    """
    directory = folder / f"{name}-{seed}"
    directory.mkdir()
    demo = arguments(str(directory / "checkpoints"), run_gpus(), cuda_graphs=cuda_graphs)
    argv = [*demo, "--data.prompt_dataset", str(prompts), *PROMPT_GROUPS]
    argv += ["--train.num_episodes", str(epochs), "--train.seed", str(seed), *options]
    if name == OPENRLHF:
        status = directory / "status.jsonl"
        command = [sys.executable, str(Path(__file__).with_name("unchanged.py")), str(status), *argv]
        with (directory / "output.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=RUN_TIMEOUT_SECONDS)
        return from_status(status)
    record = directory / "run"
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv, "--run.dir", str(record)]
    subprocess.run([*command, "--run.progress", "lines"], check=True, timeout=RUN_TIMEOUT_SECONDS)
    return from_events(record / "events.jsonl")


def run_arms(
    arms: Mapping[str, Sequence[str]], seeds: Sequence[int], run: Callable[[str, int, Sequence[str]], Steps]
) -> Iterator[dict[str, Any]]:
    """Yield a run of every arm for every seed; the order of the arms turns with every seed."""
    names = list(arms)
    for turn, seed in enumerate(seeds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            yield {"arm": name, "seed": seed, "steps": run(name, seed, arms[name])}


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


def ratios(runs: list[dict[str, Any]], arm: str, peer: str, steps: slice) -> dict[str, list[float]]:
    """Return arm against peer over these steps, one value a seed: rollout tokens/s, steps/s, whole steps' tokens/s.

    The last figure, because runs drift apart: a policy with longer responses trains longer steps in every arm.
    """
    out: dict[str, list[float]] = {"rollout": [], "step": [], "step tokens": []}
    for seed in sorted({run["seed"] for run in runs}):
        of = {run["arm"]: run["steps"] for run in runs if run["seed"] == seed}
        if arm in of and peer in of:
            for name, ours, theirs in zip(out, _speeds(of[arm][steps]), _speeds(of[peer][steps]), strict=True):
                out[name].append(ours / theirs)
    return out


def _speeds(steps: list[dict[str, Any]]) -> tuple[float, float, float]:
    tokens = sum(step["tokens"] for step in steps)
    rollout = sum(step["parts"]["rollout"] for step in steps)
    seconds = sum(sum(step["parts"].values()) for step in steps)
    return tokens / rollout, len(steps) / seconds, tokens / seconds


def interval(values: Sequence[float]) -> str:
    """Return the median of one value a seed, the least and the most, and how surely these two hold the true median.

    Free of assumptions: all of n independent values lie on one side of the median once in 2 ** (n - 1) times.
    """
    sure = 1 - 2.0 ** (1 - len(values))
    return f"{statistics.median(values):.2f}x ({min(values):.2f} to {max(values):.2f}, a {sure:.0%} interval)"


def table(runs: list[dict[str, Any]], per_epoch: int, comparisons: Sequence[tuple[str, str, str, slice]]) -> str:
    """Return the figures by arm and epoch (medians over seeds), then the ratios with their intervals."""
    columns = (
        "epoch  tokens/s  step s  rollout s  experience s  train s  sync s  tok/step  accept  ms/step  reward  cut off"
    )
    lines = [f"arm       {columns}"]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        epochs = [by_epoch(run["steps"], per_epoch) for run in runs if run["arm"] == arm]
        for number, rows in enumerate(zip(*epochs, strict=True), start=1):
            cells = [median(row.get(name) for row in rows) for name in COLUMNS]
            shown = [
                f"{value:{width}}" if value is not None else "-" for value, width in zip(cells, WIDTHS, strict=True)
            ]
            lines.append(f"{arm:10s}{number:5d}  " + "  ".join(shown))
    for arm, peer, when, steps in comparisons:
        for what, values in ratios(runs, arm, peer, steps).items():
            if values:
                lines.append(f"{arm} / {peer}, {what}, {when}: {interval(values)}")
    return "\n".join(lines)


COLUMNS = (
    "tokens_per_s", "step_s", "rollout_s", "experience_s", "train_s", "sync_s",
    "tokens_per_step", "acceptance", "ms_per_step", "reward", "truncated",
)  # fmt: skip
STEPS_PER_EPOCH = PROMPTS // PROMPTS_A_STEP
FIRST, LATER = slice(0, STEPS_PER_EPOCH), slice(STEPS_PER_EPOCH, None)
COMPARISONS = (
    ("on", OPENRLHF, "epochs 2 on", LATER),
    ("off", OPENRLHF, "epochs 2 on", LATER),
    ("on", "off", "epochs 2 on", LATER),
    ("on", "off", "epoch 1", FIRST),
    (REHEARSAL, "on", "epoch 1", FIRST),
    (REHEARSAL, "on", "epochs 2 on", LATER),
)
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

        def run(name: str, seed: int, arm_options: Sequence[str]) -> list[dict[str, Any]]:
            return run_arm(name, seed, prompts, [*options, *arm_options], folder, chosen.cuda_graphs)

        for one in run_arms({name: ARM_OPTIONS[name] for name in chosen.arms}, chosen.seeds, run):
            runs.append(one)
            chosen.out.write_text(json.dumps({**conditions, "runs": runs}) + "\n")
    print(table(runs, STEPS_PER_EPOCH, COMPARISONS))


if __name__ == "__main__":
    main()
