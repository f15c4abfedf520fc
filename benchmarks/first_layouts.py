"""Nodes that begin a step with larger engines, against switches alone: how much quicker is a rollout? Simulated.

    python benchmarks/first_layouts.py --out first_layouts.json        # less than a minute
    python benchmarks/first_layouts.py --recorded                      # stages of recorded runs

PAT's A40s (profile `pat-a40`): nodes of eight devices, four engines of TP 2 or one of TP 8. Its lengths, at most 16K,
16 prompts of 8 samples a node, OpenRLHF's synchronous trainer, dispatch by history, three epochs of four steps. The
first epoch, without history, is left out. Lengths are predicted by the epoch before. Rows: nodes, and the share of the
lengths' variance within a prompt, which no history predicts. RhymeRL's table 2 fits 3 %. Peers: switches by the rule
`history` alone, and TP 8 on all nodes all the time.

`--recorded` replays stages of three recorded runs of the embedded model (`switch_decisions.py`) on two nodes. Two steps
together are 24 prompts of 16 samples, 16 times as long as recorded. Its peer is the best single switch of each node,
found by trying every moment. After a plan the other node switches by the rule `history`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from unittest import mock

from papers_inputs import NEVER_WAITS, PAT_SEEDS, spread
from switch_decisions import RECORDED, Replay, Stage, dealt, recorded, stages, steps_seconds

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.scheduling.first_layouts import first_layouts
from rhyme_openrlhf.scheduling.tp_switch import EACH_SECONDS, SwitchCost
from rhyme_openrlhf.settings.tp_switch import BY_HISTORY
from rhyme_openrlhf.simulation import engine_kinds, layout_changes
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, Workload, drawn

NODES = (2, 4)
WITHIN = (0.03, 0.1, 0.3, 0.5)
EPOCH, STEPS = 4, 12


def seconds(load: Workload, cluster: Cluster, features: Features) -> float:
    """Return the rollouts' seconds from the second epoch on."""
    result = Run(load, cluster, features, engine_kinds.load(["pat-a40"])).go()
    return sum(step.completed - step.begun for step in result.steps[EPOCH:])


def gains(nodes: int, within: float, seed: int) -> tuple[float, float]:
    """Return the gain against switches alone, and against TP 8 on all nodes."""
    shape = dataclasses.replace(PRESETS["pat-deepscaler"], within=within)
    load = drawn(shape, STEPS, 16 * nodes, 8, EPOCH, seed)
    cluster = Cluster(nodes, 8, 2, trainer_tokens_per_second=NEVER_WAITS)
    switching = Features("sync", dispatch=True, switching="history")
    with mock.patch.object(layout_changes, "first_layouts", lambda *_: None):
        alone = seconds(load, cluster, switching)
    wide = seconds(load, dataclasses.replace(cluster, tensor_parallel=8), Features("sync", dispatch=True))
    ours = seconds(load, cluster, switching)
    return alone / ours, wide / ours


STRETCH, TOGETHER, LONGEST = 16, 2, 16 * 512
# Seconds between two decisions: stages take two minutes.
LOOK_S = 2.0
# Samples of an engine, and tokens of its KV cache: enough of both.
SEATS, ROOM = 256, 10**9


def timed(stage: Stage, profiles: tuple[Profile, Profile], longest: int, look_s: float) -> tuple[float, float, float]:
    """Return a stage's seconds on two nodes: with the best switch of each node, by the rule, and with first layouts."""
    alike = dealt(stage, 8)
    halves = [Replay(alike[first : first + 4], profiles, 1, EACH_SECONDS) for first in (0, 4)]
    best = max(half.best(look_s) for half in halves)
    alone = max(half.policy(BY_HISTORY, longest, look_s)[0] for half in halves)
    prompts = {one.prompt: one.earlier for one in stage}
    cost = SwitchCost().between([TransferModel(profile) for profile in profiles])
    samples = len(stage) // len(prompts)
    plan = first_layouts(2, halves[0].layouts, list(prompts.values()), samples, SEATS, (ROOM, ROOM), cost)
    if plan is None:
        return best, alone, alone
    at = dict(zip(prompts, plan.engine_of, strict=True))
    large = [one for one in stage if at[one.prompt][0] == 1]
    contexts, lengths = [one.prompt_tokens for one in large], [one.length for one in large]
    seconds = float(steps_seconds(StepModel(profiles[1]), contexts, lengths)[-1])
    rest = [[one for one in stage if at[one.prompt] == (0, engine)] for engine in range(4)]
    ours = max(seconds, Replay(rest, profiles, 1, EACH_SECONDS).policy(BY_HISTORY, longest, look_s)[0])
    return best, alone, ours


def replayed(stage: Stage) -> float:
    """Return the gain on a recorded stage against the best single switch of each of two nodes."""
    by_size = engine_kinds.load(["pat-a40"])
    best, _, ours = timed(stage, (by_size[2], by_size[8]), LONGEST, LOOK_S)
    return best / ours


def print_replayed() -> None:
    """Replay the recorded stages and print their gains."""
    print("| stages | against the best switches, mean | least | most |")
    print("|---|---|---|---|")
    every = []
    for name in RECORDED:
        found = [replayed(stage) for stage in stages(recorded(name), STRETCH, TOGETHER)]
        every += found
        print(f"| {name}: {len(found)} | {statistics.fmean(found):.2f}x | {min(found):.2f}x | {max(found):.2f}x |")
    print(f"| all: {len(every)} | {statistics.fmean(every):.2f}x | {min(every):.2f}x | {max(every):.2f}x |")


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recorded", action="store_true", help="stages of recorded runs")
    chosen = parser.parse_args()
    if chosen.recorded:
        return print_replayed()
    print("| nodes | variance within a prompt | against switches alone | against TP 8 everywhere |")
    print("|---|---|---|---|")
    rows = []
    for nodes in NODES:
        for within in WITHIN:
            found = [gains(nodes, within, seed) for seed in PAT_SEEDS]
            rows.append({"nodes": nodes, "within": within, "seeds": PAT_SEEDS, "gains": found})
            alone, wide = (spread([of_seed[peer] for of_seed in found]) for peer in (0, 1))
            print(f"| {nodes} | {within:.0%} | {alone} | {wide} |", flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps({"kind": "simulated", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
