"""Error of a simulated run against the real one. Measured: real runs on this machine, replayed with its own profile.

    python benchmarks/simulator.py --work FOLDER [--parts N] [--out simulator.json]
    python benchmarks/simulator.py --profile PROFILE ... --runs DIRECTORY ... [--out simulator.json]

Makes profiles (`rhyme profile --sparse` of the embedded model): an engine alone, and with one and two others beside it.
Then it makes real runs with two and three engines, with and without drafts, and replays each as `rhyme simulate
--from-run` does. The replay has the same lengths, engines and trainer's speed, and each sample's drafts. The benchmark
compares every rollout stage's seconds, and the share of the stages in which engines had nothing to run.

Each run is simulated in three ways (simulation/recorded_run.py):

- by the profile alone;
- as a forecast, where a step is as slow beside the profile as the steps before it were;
- with each step's own speed.

Then such runs again, *paced*: every step of real engines is stretched to PACE times the profile of an engine alone
(--emulate.profile). So neither the machine's present speed nor other users of its cores show. All remaining error is
the simulator's.

Profiles and runs are kept in FOLDER, and existing ones are not made again. `--parts` limits how many are made in one
call, for a machine that is not free for half an hour at a stretch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from latency_model import rhyme

from rhyme_openrlhf.latency import profile as profile_files
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.recorded_run import TOLERANCE, WAYS, read_run, replay
from rhyme_openrlhf.simulation.settings import Cluster, Features

ENGINES = (2, 3)
RUNS = {"no-drafts": ["--no-histospec.enable"], "drafts": []}
# Twice as many prompts a step as the demo has, so that a stage takes seconds; of its 48 prompts, so 2 steps an epoch.
PROMPTS, SAMPLES = 24, 8
EPOCHS, PACED_EPOCHS = 6, 5
# All of a step's prompts: how each of their responses drafted is kept.
KEPT = 64
# Steps of three engines on two cores take up to 2.5 times as long as of one alone, and longer in a bad moment.
PACE = 4.0
PACED = "paced"


@dataclasses.dataclass(frozen=True)
class Part:
    """A profile with `beside` other engines, or a run with `engines` engines."""

    path: Path
    beside: int | None = None
    engines: int = 0
    options: Sequence[str] = ()
    epochs: int = EPOCHS

    @property
    def done(self) -> Path:
        """There once it is complete."""
        return self.path if self.beside is not None else self.path.with_suffix(".done")


def parts(folder: Path) -> Iterator[Part]:
    """Return the parts, in order: a run soon after its profile, since the machine changes over the hour."""
    alone, paced = folder / "beside-0.json", folder / "paced.json"
    yield Part(alone, beside=0)
    for engines in ENGINES:
        yield Part(folder / f"beside-{engines - 1}.json", beside=engines - 1)
        for name, options in RUNS.items():
            own = options or ["--latency.profile", str(alone)]
            yield Part(folder / f"{engines}-engines-{name}", engines=engines, options=own)
    for engines in ENGINES:
        for name, options in RUNS.items():
            own = [*options, "--emulate.profile", str(paced)]
            yield Part(folder / f"{PACED}-{engines}-engines-{name}", None, engines, own, PACED_EPOCHS)


def make(part: Part, folder: Path) -> None:
    """Make one profile or run; discard the files of an interrupted attempt."""
    if part.beside is not None:
        rhyme("profile", "--sparse", "--beside", str(part.beside), "--out", str(part.path))
        return
    paced = folder / "paced.json"
    if not paced.exists():
        profile_files.write(slower(profile_files.read(folder / "beside-0.json")), paced)
    shutil.rmtree(part.path, ignore_errors=True)
    rhyme(
        "demo", "--run.dir", str(part.path), "--run.progress", "lines", "--vllm.num_engines", str(part.engines),
        "--train.num_episodes", str(part.epochs), "--rollout.batch_size", str(PROMPTS),
        "--train.batch_size", str(PROMPTS * SAMPLES), "--rollout.n_samples_per_prompt", str(SAMPLES),
        "--ckpt.path", str(folder / "checkpoints"), "--ckpt.output_dir", str(folder / "trained"),
        "--telemetry.sample_groups", str(KEPT), *part.options,
    )  # fmt: skip
    part.done.touch()


def slower(profile: Profile) -> Profile:
    """Return the profile of a machine on which everything takes PACE times as long."""
    return dataclasses.replace(
        profile,
        steps=tuple(dataclasses.replace(point, seconds=PACE * point.seconds) for point in profile.steps),
        prefills=tuple(dataclasses.replace(point, seconds=PACE * point.seconds) for point in profile.prefills),
        notes=(*profile.notes, f"times multiplied by {PACE:g}"),
    )


def replayed(directory: Path, profiles: Sequence[Path]) -> dict[str, Any]:
    """Return one run against its replays; printed, too."""
    run = read_run(directory, Cluster(), Features())
    found = replay(run, *engine_kinds.load_all([str(path) for path in profiles]))
    print(f"\n{directory.name}: {run.cluster.engines} engines, drafts {run.features.speculation}")
    print("\n".join(found.lines()), flush=True)
    ways = {}
    for way in WAYS:
        compared, seconds = found.compared[way], found.results[way].accounts.seconds
        ways[way] = {
            "within_tolerance": sum(abs(one.error) <= TOLERANCE for one in compared),
            "median_error": statistics.median(one.error for one in compared),
            "bubbles": seconds["tail"] / (seconds["rollout"] + seconds["tail"]),
            "steps": [vars(one) for one in compared],
        }
    return {
        "run": directory.name,
        "engines": run.cluster.engines,
        "speculation": run.features.speculation,
        "stages": len(run.stages),
        "slowness": [one.slowness for one in found.conditions],
        "around": [one.around for one in found.conditions],
        "ways": ways,
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="profiles and runs are kept here")
    parser.add_argument("--parts", type=int, help="make at most this many of the missing ones")
    parser.add_argument("--profile", type=Path, action="append", help="one that is there already; again for another")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="run directories to replay, without --work")
    parser.add_argument("--out", type=Path, default=Path("simulator.json"))
    chosen = parser.parse_args()
    if not chosen.work and not (chosen.profile and chosen.runs):
        parser.error("--work FOLDER, or --profile and --runs")
    asked = [(run, list(chosen.profile)) for run in chosen.runs]
    if chosen.work:
        chosen.work.mkdir(parents=True, exist_ok=True)
        missing = [part for part in parts(chosen.work) if not part.done.exists()]
        for part in missing[: chosen.parts]:
            make(part, chosen.work)
        there = [part for part in parts(chosen.work) if part.done.exists()]
        shared = [part.path for part in there if part.beside is not None]
        for part in there:
            if part.engines:
                asked.append((part.path, [chosen.work / "paced.json"] if part.path.name.startswith(PACED) else shared))
    results = [replayed(directory, profiles) for directory, profiles in asked]
    print()
    for way in WAYS:
        for paced in (False, True):
            some = [one for one in results if one["run"].startswith(PACED) == paced]
            if some:
                right = sum(one["ways"][way]["within_tolerance"] for one in some)
                stages = sum(one["stages"] for one in some)
                print(f"{way}{', paced' if paced else ''}: {right} of {stages} stages within {TOLERANCE:.0%}")
    about = {"kind": "real runs measured, replays simulated", "cpus": os.cpu_count(), "runs": results}
    chosen.out.write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
