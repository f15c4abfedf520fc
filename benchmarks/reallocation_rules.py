"""Reallocation by throughput beside reallocation by a threshold: how much quicker is a rollout? Simulated.

    python benchmarks/reallocation_rules.py --out reallocation_rules.json        # less than a minute

Eight engines, 64 prompts a step with 8 samples each (16 prompts and four engines on PAT's A40s), 8 steps of two an
epoch, OpenRLHF's synchronous trainer. Rows: the step times, the lengths, and the share of the lengths' variance within
a prompt. `best threshold` is the best of THRESHOLDS, known only after the run. Without dispatch by history
prompts are spread by count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from papers import EFFICIENCY, L40S, LLAMA_8B, NEVER_WAITS, rlhfspec_profile
from roofline import roofline

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, drawn

THRESHOLDS = (2, 4, 6, 8, 12, 19, 32)
WITHIN = (0.03, 0.5)
LENGTHS = ("rlhfspec-lmsys", "pat-deepscaler")


def kinds() -> Iterator[tuple[str, dict[int, Profile], int, int, int]]:
    """Yield the step times' name, profiles, tensor-parallel size, samples a step and samples at once."""
    yield "RLHFSpec 3.3", {1: rlhfspec_profile()}, 1, 512, 256
    yield "L40S by data sheet", {1: roofline(LLAMA_8B, L40S, 1, EFFICIENCY)}, 1, 512, 256
    yield "PAT's A40", engine_kinds.load(["pat-a40"]), 2, 128, 64


def rows() -> Iterator[dict[str, Any]]:
    """Yield each load's gains against no reallocation."""
    for name, profiles, size, samples, running in kinds():
        for lengths in LENGTHS:
            for within in WITHIN:
                shape = dataclasses.replace(PRESETS[lengths], within=within)
                load = drawn(shape, 8, samples // 8, 8, 2, 1)
                cluster = Cluster(
                    devices=8, tensor_parallel=size, running=running, trainer_tokens_per_second=NEVER_WAITS
                )
                row: dict[str, Any] = {"times": name, "lengths": lengths, "within": within}
                for dispatch in (False, True):
                    base = Features("sync", dispatch=dispatch, interval=1.0, cooldown=20)
                    plain = Run(load, cluster, base, profiles).go().rollout_seconds
                    gains = {}
                    for threshold in (0, *THRESHOLDS):
                        features = dataclasses.replace(base, reallocation=True, threshold=threshold)
                        gains[threshold] = plain / Run(load, cluster, features, profiles).go().rollout_seconds
                    best = max(THRESHOLDS, key=lambda one: gains[one])
                    row["dispatched" if dispatch else "by count"] = {"gains": gains, "best": best}
                yield row


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    print(
        "| step times | lengths | within | by throughput | best threshold | dispatched: throughput | best threshold |"
    )
    print("|---|---|---|---|---|---|---|")
    found = []
    for row in rows():
        found.append(row)
        cells = []
        for part in (row["by count"], row["dispatched"]):
            best = part["best"]
            cells += [f"{part['gains'][0]:.2f}x", f"{part['gains'][best]:.2f}x ({best})"]
        print(f"| {row['times']} | {row['lengths']} | {row['within']:.0%} | {' | '.join(cells)} |", flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps({"kind": "simulated", "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
