"""Nodes that begin a step with larger engines, against switches alone: how much quicker is a rollout? Simulated.

    python benchmarks/first_layouts.py --out first_layouts.json        # less than a minute

PAT's A40s (profile `pat-a40`): nodes of eight devices, four engines of TP 2 or one of TP 8. Its lengths, at most 16K,
16 prompts of 8 samples a node, OpenRLHF's synchronous trainer, dispatch by history, three epochs of four steps. The
first epoch, without history, is left out. Lengths are predicted by the epoch before. Rows: nodes, and the share of the
lengths' variance within a prompt, which no history predicts. RhymeRL's table 2 fits 3 %. Peers: switches by the rule
`history` alone, and TP 8 on all nodes all the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from unittest import mock

from papers import NEVER_WAITS, PAT_SEEDS, spread

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


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
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
