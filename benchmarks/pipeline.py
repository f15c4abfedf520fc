"""Bubbles and samples/s of the streaming pipeline against OpenRLHF's trainers: real runs, interleaved.

    python benchmarks/pipeline.py --arms async pipeline --out pipeline.json [-- options of rhyme train for every arm]
    python benchmarks/pipeline.py --emulate --arms sync async pipeline drafts --out pipeline.json

Arms; their order turns with every seed:

- `sync` and `async`: OpenRLHF's own loops and dispatch on our engines, without drafts (only there is every engine's
  time recorded).
- `pipeline`: --histopipe.enable without drafts. `drafts`: the same with drafts.
- `by_load` and `a_group_an_engine`: `pipeline` without rank groups, and with four of them. Its own are two.
- `async_drafts`: OpenRLHF's asynchronous loop with drafts.
- `outliers`: `drafts` with --move.enable, so that a sample much longer than its rank group moves.
- `reallocation`: `sync` with --reallocation.enable.

Written, not printed: RhymeRL's table 2 by epoch (`ranks`) and the share of an epoch's samples that moved (`moved`).

Without --emulate: two engines, measured on this machine's clock. With it: four engines, each on the clock of a pair of
A40 (the shipped profile derived from PAT's prints) slowed down by --clock. A trainer is paced to --train-s a step in
every arm. All printed is *emulated*. An emulated step can be stretched, never shortened. So the clock must be slow
enough for this machine's cores to do the real work of four engines and a trainer in the emulated times. Otherwise the
cores decide instead of the schedule: `train s` is the longest training step of each arm, beside the requested one.

The workload: problems of the embedded task at even distances of its length distribution, whose answers have 7 to 400
tokens (with --emulate 7 to 160).

Whole-run samples/s are counted from the end of the first training step to the end of the last, so that no arm's start
counts. Bubble fractions from the second epoch on: of the rollout stages (docs/architecture.md), and of all the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.simulation.engine_kinds import FOLDER
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import (
    EngineInterval,
    OffPolicyness,
    RankStability,
    Recorded,
    RolloutFinished,
    RolloutStarted,
    RunStarted,
    SampleMoved,
    TrainStep,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from embedded_tasks import STEP_COUNTS, jsonl, make_problem

ASYNC = ("--train.async_enable", "--no-histospec.enable")
ARMS: dict[str, tuple[str, ...]] = {
    "sync": ("--no-histospec.enable",),
    "async": ASYNC,
    "pipeline": (*ASYNC, "--histopipe.enable"),
    "by_load": (*ASYNC, "--histopipe.enable", "--histopipe.rank_groups", "1"),
    "a_group_an_engine": (*ASYNC, "--histopipe.enable", "--histopipe.rank_groups", "4"),
    "drafts": ("--train.async_enable", "--histopipe.enable"),
    "async_drafts": ("--train.async_enable",),
    "reallocation": ("--no-histospec.enable", "--reallocation.enable"),
    "outliers": ("--train.async_enable", "--histopipe.enable", "--move.enable"),
}
COMPARED = (
    ("pipeline", "async"),
    ("pipeline", "sync"),
    ("by_load", "pipeline"),
    ("a_group_an_engine", "pipeline"),
    ("drafts", "async"),
    ("drafts", "async_drafts"),
    ("outliers", "drafts"),
    ("reallocation", "sync"),
)
# Two steps an epoch. Many prompts with few samples each, so that an engine's part depends on their lengths, not on
# which engine has the longest prompt of all. A small learning rate keeps the lengths those of the prompts. With the
# demo's own, a policy that is trained on two samples a prompt soon runs into the limit of length.
PROMPTS = 48
SHAPE = (
    "--rollout.batch_size", "24", "--rollout.n_samples_per_prompt", "2", "--train.num_episodes", "6",
    "--train.batch_size", "48", "--actor.adam.lr", "1e-6",
)  # fmt: skip
MEASURED = ("--latency.profile", "none")
EMULATED_PROFILE = FOLDER / "pat-a40-tp2.json"
# With --emulate, responses have 0.4 times as many steps, and a sample that answers in circles ends at 192 tokens. So
# four engines and a trainer fit on two cores, and a training step really takes 1 to 1.5 s. With a clock 4 times slower
# than the profile's, a rollout stage of OpenRLHF's loop takes 7 to 8 s. Training is a sixth of that, as in RhymeRL
# (figure 2: rollouts are 84 to 91 % of the time). It decides how long a pipeline that is at most one step off policy
# waits for weights. The wait is zero while training is shorter than the shortest rank group's part of a step.
SHORTER = 0.4
LONGEST = ("--rollout.max_new_tokens", "192")
CLOCK = 4.0
TRAIN_SECONDS = 1.2
RUN_TIMEOUT_SECONDS = 600


def write_prompts(path: Path, shorter: float) -> None:
    """Write the workload's prompts, the same every time; responses have `shorter` times as many steps."""
    rng = random.Random(20)
    kinds = ("chain", "path", "sort")
    problems = [
        make_problem(
            kind, max(STEP_COUNTS[kind].minimum, round(shorter * STEP_COUNTS[kind].at((number + 0.5) / PROMPTS))), rng
        )
        for number in range(PROMPTS)
        for kind in [kinds[number % len(kinds)]]
    ]
    path.write_text(jsonl(problems))


def write_clock(path: Path, clock: float) -> None:
    """Write the emulated machine's profile, with every time in it multiplied by `clock`."""
    profile = profiles.read(Path(str(EMULATED_PROFILE)))
    profiles.write(
        dataclasses.replace(
            profile,
            steps=tuple(dataclasses.replace(point, seconds=point.seconds * clock) for point in profile.steps),
            prefills=tuple(dataclasses.replace(point, seconds=point.seconds * clock) for point in profile.prefills),
            notes=(*profile.notes, f"slowed down {clock:g} times"),
        ),
        path,
    )


def emulation(clock: float, train_seconds: float, folder: Path) -> list[str]:
    """Options of an emulated run."""
    path = folder / "clock.json"
    write_clock(path, clock)
    return [
        "--vllm.num_engines", "4", "--emulate.profile", str(path), "--emulate.train_s", str(train_seconds), *LONGEST,
    ]  # fmt: skip


def run_arm(arm: str, seed: int, options: Sequence[str], folder: Path) -> dict[str, Any]:
    """Make one run; return its figures."""
    directory = folder / f"{arm}-{seed}"
    argv = [*arguments(str(directory / "checkpoints")), *SHAPE, "--train.seed", str(seed), *options, *ARMS[arm]]
    argv += ["--data.prompt_dataset", str(folder / "prompts.jsonl")]
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv, "--run.dir", str(directory / "run")]
    subprocess.run([*command, "--run.progress", "lines"], check=True, timeout=RUN_TIMEOUT_SECONDS)
    return figures(list(read_events(directory / "run" / "events.jsonl")))


def figures(record: Sequence[Recorded]) -> dict[str, Any]:
    """Return the figures of a run's event log; bubbles from the second epoch on."""
    events = [recorded.event for recorded in record]
    run = next(event for event in events if isinstance(event, RunStarted))
    trained = [recorded for recorded in record if isinstance(recorded.event, TrainStep)]
    finished = {event.step: event for event in events if isinstance(event, RolloutFinished)}
    samples = sum(event.samples for event in finished.values()) - finished[1].samples
    tokens = sum(event.response_tokens for event in finished.values()) - finished[1].response_tokens
    seconds = trained[-1].time - trained[0].time
    begun = {r.event.step: r.time for r in record if isinstance(r.event, RolloutStarted)}
    stages = {step: (begun[step], begun[step] + one.seconds) for step, one in finished.items()}
    later = [step for step, one in finished.items() if one.epoch > 1]
    border, end = stages[min(later)][0], stages[max(later)][1]
    states: dict[str, float] = defaultdict(float)
    staged = idle = 0.0
    for one in (event for event in events if isinstance(event, EngineInterval)):
        inside = min(one.end, end) - max(one.start, border)
        if inside <= 0:
            continue
        states["rollout" if one.state == "generate" else one.cause] += inside
        if one.step in stages and one.state != "generate":
            first, last = stages[one.step]
            idle += max(0.0, min(one.end, last) - max(one.start, first))
    staged = run.engines * sum(stages[step][1] - stages[step][0] for step in later)
    wall = run.engines * (end - border)
    ages: dict[int, int] = defaultdict(int)
    for event in events:
        if isinstance(event, OffPolicyness):
            for age, count in zip(event.values, event.samples, strict=True):
                ages[age] += count
    epoch_of = {step: one.epoch for step, one in finished.items()}
    moved = Counter(epoch_of[event.step] for event in events if isinstance(event, SampleMoved))
    generated: Counter[int] = Counter()
    for stage in finished.values():
        generated[stage.epoch] += stage.samples
    ends = [recorded.time for recorded in trained]
    parts = [recorded.event.seconds_by_part for recorded in trained]
    return {
        "emulated": run.emulated,
        "samples_per_s": samples / seconds,
        "tokens_per_s": tokens / seconds,
        "step_s": statistics.median(after - before for before, after in itertools.pairwise(ends)),
        "train_s": max(part["train"] for part in parts),
        "parts": {name: statistics.median(part[name] for part in parts) for name in parts[0]},
        "bubble_stage": idle / staged,
        "bubble_wall": 1 - states["rollout"] / wall,
        "states": {name: one / wall for name, one in sorted(states.items())},
        "ranks": [structs.asdict(event) for event in events if isinstance(event, RankStability)],
        "moved": {epoch: moved[epoch] / count for epoch, count in sorted(generated.items())},
        "off_policyness": dict(sorted(ages.items())),
        "reward": [event.metrics["reward"] for event in events if isinstance(event, TrainStep)][-1],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Return a row an arm (medians over seeds), and the ratios to `async` and `sync`."""
    kind = "emulated" if any(run["emulated"] for run in runs) else "measured"
    lines = [f"{kind:12s} samples/s   step s   train s   bubbles of stage   of all time   where the time goes"]
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_arm[run["arm"]].append(run)

    def of(arm: str, name: str) -> float:
        return statistics.median(run[name] for run in by_arm[arm])

    for arm in by_arm:
        causes = {name for run in by_arm[arm] for name in run["states"]}
        shares = {c: statistics.median(run["states"].get(c, 0.0) for run in by_arm[arm]) for c in sorted(causes)}
        lines.append(
            f"{arm:12s} {of(arm, 'samples_per_s'):9.2f} {of(arm, 'step_s'):8.2f} {of(arm, 'train_s'):9.2f}"
            f" {of(arm, 'bubble_stage'):18.1%}"
            f" {of(arm, 'bubble_wall'):13.1%}   " + ", ".join(f"{c} {share:.1%}" for c, share in shares.items())
        )
    for arm, peer in COMPARED:
        if arm in by_arm and peer in by_arm:
            speed = of(arm, "samples_per_s") / of(peer, "samples_per_s")
            bubbles = of(arm, "bubble_stage") / of(peer, "bubble_stage")
            lines.append(f"{arm} / {peer}: samples/s {speed:.2f}x, bubbles {bubbles:.2f}x ({kind})")
    return "\n".join(lines)


def main() -> None:
    """Run and report; runs are added to those in --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=tuple(ARMS))
    parser.add_argument("--emulate", action="store_true", help="four engines and a trainer on another machine's clock")
    parser.add_argument("--clock", type=float, default=CLOCK, help="with --emulate: times slower than the profile")
    parser.add_argument("--train-s", type=float, default=TRAIN_SECONDS, help="with --emulate: seconds to train a step")
    parser.add_argument("--keep", type=Path, help="directory for the runs' records (else they are not kept)")
    parser.add_argument("--out", type=Path, default=Path("pipeline.json"))
    parser.add_argument("options", nargs="*", help="options of rhyme train, after --")
    chosen = parser.parse_args()
    runs = json.loads(chosen.out.read_text())["runs"] if chosen.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="rhyme-pipeline-") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        own = emulation(chosen.clock, chosen.train_s, folder) if chosen.emulate else MEASURED
        options = [*own, *chosen.options]
        write_prompts(folder / "prompts.jsonl", SHORTER if chosen.emulate else 1.0)
        for turn, seed in enumerate(chosen.seeds):
            for arm in [*chosen.arms[turn % len(chosen.arms) :], *chosen.arms[: turn % len(chosen.arms)]]:
                runs.append({"arm": arm, "seed": seed, **run_arm(arm, seed, options, folder)})
                chosen.out.write_text(json.dumps({"cpus": os.cpu_count(), "options": options, "runs": runs}) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
