"""Reallocation by throughput beside reallocation by a threshold: how much quicker is a rollout? Simulated.

    python benchmarks/reallocation_rules.py --out reallocation_rules.json        # less than a minute
    python benchmarks/reallocation_rules.py --orders                             # which sample moves first; 3 minutes

Eight engines, 64 prompts a step with 8 samples each (16 prompts and four engines on PAT's A40s), 8 steps of two an
epoch, OpenRLHF's synchronous trainer. Rows: the step times, the lengths, and the share of the lengths' variance within
a prompt. `best threshold` is the best of THRESHOLDS, known only after the run. Without dispatch by history
prompts are spread by count.

`--orders` compares the order in which samples leave an engine. There each sample has an acceptance of its own: draft
tokens accepted per step are log-normal (assumed: mean 1.5, sigma 0.6, half of the variance within a prompt).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from papers_inputs import EFFICIENCY, L40S, LLAMA_8B, NEVER_WAITS
from papers_rlhfspec import rlhfspec_profile
from roofline import roofline

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.scheduling import reallocation
from rhyme_openrlhf.scheduling.reallocation import RunningSample, leaving_order
from rhyme_openrlhf.simulation import engine_kinds
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.workload import PRESETS, StepLoad, Workload, drawn

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


SEEDS = (1, 2, 3)
ACCEPTED, SIGMA, SHARE_WITHIN = 1.5, 0.6, 0.5
# Draft tokens that are accepted, of those verified.
ACCEPTANCE_RATE = 0.7
# Samples that an engine runs at once where not all of a step's have a seat.
FEW_SEATS = {1: 24, 2: 12}
ORDERS: dict[str, Callable[[RunningSample], tuple[float, ...]]] = {
    "shortest first": leaving_order,
    "least accepted first": lambda sample: (sample[1], sample[0], sample[2]),
    # The tokens that a sample would have made while its KV cache travels.
    "by their product": lambda sample: ((1 + sample[1]) * sample[0], *sample),
}


def with_acceptance(load: Workload, seed: int) -> Workload:
    """Return the workload with an acceptance for each sample."""
    random = np.random.default_rng(seed)
    levels: dict[int, float] = {}
    steps = []
    for step in load.steps:
        prompts = []
        for prompt in step.prompts:
            level = levels.setdefault(prompt.prompt, random.standard_normal())
            own = random.standard_normal(len(prompt.lengths))
            normal = math.sqrt(1 - SHARE_WITHIN) * level + math.sqrt(SHARE_WITHIN) * own
            accepted = (ACCEPTED * np.exp(SIGMA * normal - SIGMA**2 / 2)).tolist()
            drafting = tuple(((0.0, 1 + one, one / ACCEPTANCE_RATE),) for one in accepted)
            prompts.append(dataclasses.replace(prompt, drafting=drafting))
        steps.append(StepLoad(step.epoch, tuple(prompts)))
    return dataclasses.replace(load, steps=tuple(steps))


def orders() -> Iterator[dict[str, Any]]:
    """Yield each order's gains against no reallocation, for each step times and number of seats."""
    for name, profiles, size, samples, running in kinds():
        if name == "RLHFSpec 3.3":
            # Its throughput includes what drafts gave.
            steps = (dataclasses.replace(one, seconds=one.seconds * (1 + ACCEPTED)) for one in profiles[1].steps)
            profiles = {1: dataclasses.replace(profiles[1], steps=tuple(steps))}
        for seats in (running, FEW_SEATS[size]):
            gains = defaultdict(list)
            for lengths, within, seed, dispatch in itertools.product(LENGTHS, WITHIN, SEEDS, (False, True)):
                shape = dataclasses.replace(PRESETS[lengths], within=within)
                load = with_acceptance(drawn(shape, 6, samples // 8, 8, 2, seed), seed)
                cluster = Cluster(devices=8, tensor_parallel=size, running=seats, trainer_tokens_per_second=NEVER_WAITS)
                base = Features("sync", dispatch=dispatch, interval=1.0, cooldown=20, speculation="measured")
                plain = Run(load, cluster, base, profiles).go().rollout_seconds
                features = dataclasses.replace(base, reallocation=True)
                for order, key in ORDERS.items():
                    reallocation.leaving_order = key
                    gains[order].append(plain / Run(load, cluster, features, profiles).go().rollout_seconds)
                reallocation.leaving_order = leaving_order
            yield {"times": name, "seats": seats, "gains": gains}


def print_orders(out: Path | None) -> None:
    """Simulate all orders, print their gains in the geometric mean, and write them."""
    print(f"| step times | seats | {' | '.join(ORDERS)} |")
    print(f"|---|---|{'---|' * len(ORDERS)}")
    found = []
    for row in orders():
        found.append(row)
        means = (f"{statistics.geometric_mean(row['gains'][order]):.3f}x" for order in ORDERS)
        print(f"| {row['times']} | {row['seats']} | {' | '.join(means)} |", flush=True)
    for order in ORDERS:
        both = [pair for row in found for pair in zip(row["gains"][order], row["gains"]["shortest first"], strict=True)]
        logs = [math.log(own / shortest) for own, shortest in both]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        print(f"{order}, against shortest first: {statistics.fmean(logs):+.2%}, standard error {error:.2%}")
    if out:
        out.write_text(json.dumps({"kind": "simulated", "orders": found}, indent=1) + "\n")


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--orders", action="store_true", help="which sample moves first")
    chosen = parser.parse_args()
    if chosen.orders:
        return print_orders(chosen.out)
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
