"""A node that begins with a larger engine, against switches alone, on real engines on the clock of PAT's A40. Emulated.

    python benchmarks/first_layouts_paced.py --out first_layouts_paced.json

Each of two nodes has four engines of TP 2 and one of TP 8. All are of the embedded model. Their steps take PAT's times,
stretched by --slower so that this machine keeps up; the lateness of steps is counted. A node has 16 prompts of 8
samples. Lengths are PAT's, with 3 % of their variance within a prompt; its 16K are --longest tokens here. Every sample
is as long in every arm. History knows the lengths of the epoch before.

Arms, interleaved: `alone` is the product's dispatch by predicted work and its switches; with `first` the product's
switcher also chooses the engines of the first token. Beside each gain stands the simulated one of the same stage.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from first_layouts import timed
from movable_engines import LocalEngine
from switch_bench import Stage
from switch_decisions import Response
from tp_switch import settings, slowed

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.moves.tp_switcher import TpSwitcher
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.scheduling.step_plan import by_predicted_work
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.simulation.engine_kinds import load
from rhyme_openrlhf.simulation.workload import PRESETS, drawn

NODES, ALIGNED, DEVICES = 2, 4, 8
PROMPT = 8
ARMS = ("alone", "first")
PLAN = LayoutPlan(NODES * ALIGNED, DEVICES // ALIGNED, (Tail(NODES, DEVICES),))
# Of each engine, aligned ones first.
NODE_OF = {number: f"node {number // ALIGNED}" for number in range(NODES * ALIGNED)} | {
    NODES * ALIGNED + node: f"node {node}" for node in range(NODES)
}


def lengths(options: argparse.Namespace, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return each prompt's lengths in the epoch before and in this one."""
    shape = dataclasses.replace(PRESETS["pat-deepscaler"], within=0.03)
    both = drawn(shape, 2, NODES * options.prompts, options.samples, 1, seed).steps
    before, now = (
        {one.prompt: [max(round(n * options.longest / shape.longest), 2) for n in one.lengths] for one in step.prompts}
        for step in both
    )
    return [before[prompt] for prompt in now], list(now.values())


def start(folder: Path, options: argparse.Namespace) -> tuple[list[LocalEngine], tuple[Profile, Profile]]:
    """Start all engines, each on the clock of its size."""
    given = load(["pat-a40"])
    found = []
    for size in (DEVICES // ALIGNED, DEVICES):
        found.append(slowed(given[size], options.slower))
        profiles.write(found[-1], folder / f"{size}.json")
    seats = options.prompts * options.samples + 1
    engines = []
    for number in NODE_OF:
        size = DEVICES // ALIGNED if number < PLAN.engines else DEVICES
        paced = settings(96, str(folder / f"{size}.json"))
        engines.append(LocalEngine(number, paced, 512, seats, len(NODE_OF)))
        print(f"engine {number} of TP {size} is there", flush=True)
    return engines, (found[0], found[1])


def run(arm: str, engines: list[LocalEngine], clocks: tuple[Profile, Profile], folder: Path, stage: Any) -> Any:
    """Run one stage; return its seconds, switches and prompts at larger engines."""
    from vllm import SamplingParams

    before, now, chance = stage
    asked, known = [], {}
    for place, of_prompt in enumerate(now):
        prompt = tuple(chance.randrange(5, 100) for _ in range(PROMPT))
        known[f"p{place}"] = tuple(before[place])
        for tokens in of_prompt:
            parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            parameters.detokenize = False
            asked.append(SampleRequest(prompt, parameters, f"p{place}"))
    samples = len(now[0])
    larger = []

    async def begins(switcher: TpSwitcher) -> list[int]:
        chosen = await switcher.first_engines(before, samples) if arm == "first" else None
        larger.append(0 if chosen is None else sum(engine >= PLAN.engines for engine in chosen))
        if chosen is None:
            chosen = by_predicted_work(before, [0] * PLAN.engines, samples)
            assert chosen is not None
        return [engine for engine in chosen for _ in range(samples)]

    found = asyncio.run(
        Stage(engines, PLAN, folder, TpSwitchSettings(enable=True, status_s=0.5), clocks, NODE_OF).run(
            asked, known, begins
        )
    )
    return {"arm": arm, "larger": larger[0], **found}


async def late_seconds(engines: list[LocalEngine]) -> list[float]:
    """Return by how much each engine's steps took longer than its pace so far."""
    return [float(await engine.scheduler("late_seconds")) for engine in engines]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all arms of all loads, interleaved, and print the gains."""
    rows: list[dict[str, Any]] = []
    gains, simulated = [], []
    print("| load | alone | first layouts | prompts at the larger engine | gain | simulated | latest step |")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rhyme-benchmark-") as name:
        folder = Path(name)
        engines, clocks = start(folder, options)
        try:
            for seed in options.seeds:
                before, now = lengths(options, seed)
                took, late, answers = {}, 0.0, []
                for arm in ARMS if seed % 2 else ARMS[::-1]:
                    then = asyncio.run(late_seconds(engines))
                    row = run(arm, engines, clocks, folder, (before, now, random.Random(seed)))
                    lately = [end - at for end, at in zip(asyncio.run(late_seconds(engines)), then, strict=True)]
                    answers.append(row.pop("tokens"))
                    took[arm], late = row, max(late, *lately)
                    rows.append({"seed": seed, "late_s": max(lately), **row})
                stage = [
                    Response(place, PROMPT, length, tuple(before[place]))
                    for place, of_prompt in enumerate(now)
                    for length in of_prompt
                ]
                _, alone, ours = timed(stage, clocks, options.longest, 0.5)
                gains.append(took["alone"]["seconds"] / took["first"]["seconds"])
                simulated.append(alone / ours)
                rows[-1] |= {"simulated": [alone, ours], "equal": answers[0] == answers[1]}
                print(
                    f"| {seed} | {took['alone']['seconds']:.1f} s | {took['first']['seconds']:.1f} s | "
                    f"{took['first']['larger']} | {gains[-1]:.3f}x | {alone:.1f} and {ours:.1f} s: "
                    f"{simulated[-1]:.3f}x | {late:.1f} s, tokens {'equal' if rows[-1]['equal'] else 'differ'} |",
                    flush=True,
                )
        finally:
            for engine in engines:
                engine.stop()
    means = statistics.geometric_mean(gains), statistics.geometric_mean(simulated)
    print(f"mean {means[0]:.3f}x; simulated {means[1]:.3f}x")
    return {"rows": rows, "gains": gains, "simulated": simulated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_layouts_paced.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], help="loads, each in both arms")
    parser.add_argument("--prompts", type=int, default=16, help="of a node")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--longest", type=int, default=160, help="tokens that stand for 16K")
    parser.add_argument("--slower", type=float, default=16.0)
    options = parser.parse_args()
    conditions = {"kind": "emulated", "cpus": os.cpu_count(), "load_average": os.getloadavg(), "slower": options.slower}
    options.out.write_text(json.dumps({**conditions, **measure(options)}, default=str) + "\n")


if __name__ == "__main__":
    main()
